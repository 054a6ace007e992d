#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "kernels.h"

// ---- NEON, which every 64-bit ARM has

static inline void blend_16(const uint8_t *const *rows, const int16_t *weights, int taps, int shift,
                            int at, int16_t *out) {
    int32x4_t sums[4];
    for (int j = 0; j < 4; j++) sums[j] = vdupq_n_s32(1 << (shift - 1));
    for (int k = 0; k < taps; k++) {
        const uint8x16_t row = vld1q_u8(rows[k] + at);
        const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(row)));
        const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(row));
        sums[0] = vmlal_n_s16(sums[0], vget_low_s16(low), weights[k]);
        sums[1] = vmlal_high_n_s16(sums[1], low, weights[k]);
        sums[2] = vmlal_n_s16(sums[2], vget_low_s16(high), weights[k]);
        sums[3] = vmlal_high_n_s16(sums[3], high, weights[k]);
    }
    const int32x4_t by = vdupq_n_s32(-shift);
    for (int j = 0; j < 4; j++) vst1_s16(out + at + 4 * j, vmovn_s32(vshlq_s32(sums[j], by)));
}

static void blend_rows(const uint8_t *const *rows, const int16_t *weights, int taps, int precision,
                       int n, int16_t *out) {
    if (n < 16) {
        scalar_kernels.blend_rows(rows, weights, taps, precision, n, out);
        return;
    }
    const int shift = precision - FRACTION;
    int at = 0;
    for (; at + 16 <= n; at += 16) blend_16(rows, weights, taps, shift, at, out);
    if (at < n) blend_16(rows, weights, taps, shift, n - 16, out);  // some of them once more
}

// Odd taps have a sum of their own: one addition need not wait for the other.
static inline void mix_pixel(const int16_t *from, const int16_t *weights, int taps, int shift,
                             int channels, uint8_t *out, int bytes) {
    int32x4_t even = vdupq_n_s32(1 << (shift - 1)), odd = vdupq_n_s32(0);
    for (int k = 0; k < taps; k += 2, from += 2 * channels) {
        even = vmlal_n_s16(even, vld1_s16(from), weights[k]);
        odd = vmlal_n_s16(odd, vld1_s16(from + channels), weights[k + 1]);
    }
    const int32x4_t sum = vshlq_s32(vaddq_s32(even, odd), vdupq_n_s32(-shift));
    const uint16x4_t half = vqmovun_s32(sum);
    const uint8x8_t pixel = vqmovn_u16(vcombine_u16(half, half));
    const uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(pixel), 0);
    memcpy(out, &packed, bytes);
}

static void mix_columns(const int16_t *row, const struct axis *across, int channels, uint8_t *out) {
    if (channels < 3) {
        scalar_kernels.mix_columns(row, across, channels, out);
        return;
    }
    const int taps = across->taps, last = across->outputs - 1;
    const int shift = across->precision + FRACTION;
    const int16_t *weights = across->weights;
    // A pixel of three channels is written with the next one's first byte, the last one without.
    for (int i = 0; i < last; i++, weights += taps, out += channels)
        mix_pixel(row + (size_t)across->first[i] * channels, weights, taps, shift, channels, out,
                  4);
    mix_pixel(row + (size_t)across->first[last] * channels, weights, taps, shift, channels, out,
              channels);
}

const struct kernels neon_kernels = {"neon", blend_rows, mix_columns};
#endif
