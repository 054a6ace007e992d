#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

static inline int32_t pair_at(const int16_t *weights) {
    int32_t pair;
    memcpy(&pair, weights, sizeof pair);
    return pair;
}

// ---- SSE2, which every x86-64 has

static inline void blend_8(const uint8_t *const *rows, const int16_t *weights, int taps, int shift,
                           int at, int16_t *out) {
    const __m128i zero = _mm_setzero_si128();
    __m128i low = _mm_set1_epi32(1 << (shift - 1)), high = low;
    for (int k = 0; k < taps; k += 2) {
        const __m128i a = _mm_loadl_epi64((const __m128i *)(rows[k] + at));
        const __m128i b = _mm_loadl_epi64((const __m128i *)(rows[k + 1] + at));
        const __m128i both = _mm_unpacklo_epi8(a, b), w = _mm_set1_epi32(pair_at(weights + k));
        low = _mm_add_epi32(low, _mm_madd_epi16(_mm_unpacklo_epi8(both, zero), w));
        high = _mm_add_epi32(high, _mm_madd_epi16(_mm_unpackhi_epi8(both, zero), w));
    }
    const __m128i by = _mm_cvtsi32_si128(shift);
    const __m128i packed = _mm_packs_epi32(_mm_sra_epi32(low, by), _mm_sra_epi32(high, by));
    _mm_storeu_si128((__m128i *)(out + at), packed);
}

static void blend_rows_sse2(const uint8_t *const *rows, const int16_t *weights, int taps,
                            int precision, int n, int16_t *out) {
    if (n < 8) {
        scalar_kernels.blend_rows(rows, weights, taps, precision, n, out);
        return;
    }
    const int shift = precision - FRACTION;
    int at = 0;
    for (; at + 8 <= n; at += 8) blend_8(rows, weights, taps, shift, at, out);
    if (at < n) blend_8(rows, weights, taps, shift, n - 8, out);  // some of them once more
}

static inline void mix_pixel_sse2(const int16_t *from, const int16_t *weights, int taps, int shift,
                                  int channels, uint8_t *out, int bytes) {
    __m128i sum = _mm_set1_epi32(1 << (shift - 1));
    for (int k = 0; k < taps; k += 2, from += 2 * channels) {
        const __m128i a = _mm_loadl_epi64((const __m128i *)from);
        const __m128i b = _mm_loadl_epi64((const __m128i *)(from + channels));
        const __m128i w = _mm_set1_epi32(pair_at(weights + k));
        sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_unpacklo_epi16(a, b), w));
    }
    sum = _mm_sra_epi32(sum, _mm_cvtsi32_si128(shift));
    sum = _mm_packs_epi32(sum, sum);
    const int pixel = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
    memcpy(out, &pixel, bytes);
}

static void mix_columns_sse2(const int16_t *row, const struct axis *across, int channels,
                             uint8_t *out) {
    if (channels < 3) {
        scalar_kernels.mix_columns(row, across, channels, out);
        return;
    }
    const int taps = across->taps, last = across->outputs - 1;
    const int shift = across->precision + FRACTION;
    const int16_t *weights = across->weights;
    // A pixel of three channels is written with the next one's first byte, the last one without.
    for (int i = 0; i < last; i++, weights += taps, out += channels)
        mix_pixel_sse2(row + (size_t)across->first[i] * channels, weights, taps, shift, channels,
                       out, 4);
    mix_pixel_sse2(row + (size_t)across->first[last] * channels, weights, taps, shift, channels,
                   out, channels);
}

const struct kernels sse2_kernels = {"sse2", blend_rows_sse2, mix_columns_sse2};

// ---- AVX2

#define AVX2 __attribute__((target("avx2")))

AVX2 static inline void blend_16(const uint8_t *const *rows, const int16_t *weights, int taps,
                                 int shift, int at, int16_t *out) {
    __m256i low = _mm256_set1_epi32(1 << (shift - 1)), high = low;
    for (int k = 0; k < taps; k += 2) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(rows[k] + at));
        const __m128i b = _mm_loadu_si128((const __m128i *)(rows[k + 1] + at));
        const __m256i w = _mm256_set1_epi32(pair_at(weights + k));
        const __m256i first = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        const __m256i second = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(first, w));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(second, w));
    }
    const __m128i by = _mm_cvtsi32_si128(shift);
    __m256i packed = _mm256_packs_epi32(_mm256_sra_epi32(low, by), _mm256_sra_epi32(high, by));
    packed = _mm256_permute4x64_epi64(packed, 0xD8);  // packing goes by halves
    _mm256_storeu_si256((__m256i *)(out + at), packed);
}

AVX2 static void blend_rows_avx2(const uint8_t *const *rows, const int16_t *weights, int taps,
                                 int precision, int n, int16_t *out) {
    if (n < 16) {
        sse2_kernels.blend_rows(rows, weights, taps, precision, n, out);
        return;
    }
    const int shift = precision - FRACTION;
    int at = 0;
    for (; at + 16 <= n; at += 16) blend_16(rows, weights, taps, shift, at, out);
    if (at < n) blend_16(rows, weights, taps, shift, n - 16, out);
}

// Two pixels at once, one in each half of a register.
AVX2 static void mix_columns_avx2(const int16_t *row, const struct axis *across, int channels,
                                  uint8_t *out) {
    if (channels != 3) {
        sse2_kernels.mix_columns(row, across, channels, out);
        return;
    }
    const int taps = across->taps, last = across->outputs - 1;
    const int shift = across->precision + FRACTION;
    const __m128i by = _mm_cvtsi32_si128(shift);
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    // Of pixels r g b R G B, pairs r R, g G, b B.
    const __m256i pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1));
    const int16_t *weights = across->weights;
    int i = 0;
    for (; i + 2 <= last; i += 2, weights += 2 * taps, out += 6) {
        const int16_t *one = row + (size_t)across->first[i] * 3;
        const int16_t *other = row + (size_t)across->first[i + 1] * 3;
        __m256i sum = half;
        for (int k = 0; k < taps; k += 2) {
            const __m256i pixels = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(one + 3 * k))),
                _mm_loadu_si128((const __m128i *)(other + 3 * k)), 1);
            const __m256i w = _mm256_inserti128_si256(
                _mm256_castsi128_si256(_mm_set1_epi32(pair_at(weights + k))),
                _mm_set1_epi32(pair_at(weights + taps + k)), 1);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, pairs), w));
        }
        sum = _mm256_sra_epi32(sum, by);
        sum = _mm256_packs_epi32(sum, sum);
        sum = _mm256_packus_epi16(sum, sum);
        const int first = _mm256_extract_epi32(sum, 0), second = _mm256_extract_epi32(sum, 4);
        memcpy(out, &first, 4);
        memcpy(out + 3, &second, 4);
    }
    for (; i <= last; i++, weights += taps, out += 3)
        mix_pixel_sse2(row + (size_t)across->first[i] * 3, weights, taps, shift, 3, out,
                       i < last ? 4 : 3);
}

const struct kernels avx2_kernels = {"avx2", blend_rows_avx2, mix_columns_avx2};
#endif
