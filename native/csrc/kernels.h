// The two inner loops of resampling, once for each instruction set. All give the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>

// How an axis of the output is made of an axis of the input: output i is the sum of `taps` inputs
// from `first[i]` on, by weights whose sum is 1 << precision. `taps` is even; weights of inputs
// that do not count are 0.
struct axis {
    int outputs;
    int taps;
    int precision;
    int32_t *first;
    int16_t *weights;  // [outputs][taps]
};

enum {
    FRACTION = 7,        // bits behind the point between the two passes: 255 << 7 fits an int16
    LONGEST_READ = 16,   // int16 that may be read from the first of a row's last inputs on
};

struct kernels {
    const char *name;
    // out[i] = the weighted sum of rows[k][i], for i < n.
    void (*blend_rows)(const uint8_t *const *rows, const int16_t *weights, int taps, int precision,
                       int n, int16_t *out);
    // Writes one row of `across->outputs` pixels. LONGEST_READ int16 more than the row's are there.
    void (*mix_columns)(const int16_t *row, const struct axis *across, int channels, uint8_t *out);
};

extern const struct kernels scalar_kernels;
#if defined(__x86_64__)
extern const struct kernels sse2_kernels, avx2_kernels;
#elif defined(__aarch64__)
extern const struct kernels neon_kernels;
#endif
