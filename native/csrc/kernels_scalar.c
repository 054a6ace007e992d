#include "kernels.h"

static void blend_rows(const uint8_t *const *rows, const int16_t *weights, int taps, int precision,
                       int n, int16_t *out) {
    const int shift = precision - FRACTION, half = 1 << (shift - 1);
    for (int i = 0; i < n; i++) {
        int32_t sum = half;
        for (int k = 0; k < taps; k++) sum += rows[k][i] * weights[k];
        out[i] = (int16_t)(sum >> shift);
    }
}

static void mix_columns(const int16_t *row, const struct axis *across, int channels, uint8_t *out) {
    const int shift = across->precision + FRACTION, half = 1 << (shift - 1);
    for (int i = 0; i < across->outputs; i++) {
        const int16_t *weights = across->weights + (size_t)i * across->taps;
        const int16_t *from = row + (size_t)across->first[i] * channels;
        for (int c = 0; c < channels; c++) {
            int32_t sum = half;
            for (int k = 0; k < across->taps; k++)
                if (weights[k]) sum += from[k * channels + c] * weights[k];
            *out++ = (uint8_t)(sum >> shift);
        }
    }
}

const struct kernels scalar_kernels = {"scalar", blend_rows, mix_columns};
