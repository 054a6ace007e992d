// Pixels of a PNG, from what its zlib stream holds (PNG, third edition, section 9: filtering).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stoker_native.h"

enum filter { NONE, SUB, UP, AVERAGE, PAETH };

static inline uint8_t nearest(int left, int above, int corner) {
    const int to_left = abs(above - corner), to_above = abs(left - corner);
    const int to_corner = abs(left + above - 2 * corner);
    const int is_above = to_above < to_left;
    const int value = is_above ? above : left, distance = is_above ? to_above : to_left;
    return (uint8_t)(to_corner < distance ? corner : value);
}

// Writes a row of n bytes; `step` is known where this is compiled, which makes it twice as fast.
static inline int unfilter(int filter, const uint8_t *restrict from, const uint8_t *restrict above,
                           uint8_t *restrict row, size_t n, const size_t step) {
    switch (filter) {
        case NONE:
            memcpy(row, from, n);
            return DONE;
        case SUB:
            for (size_t i = 0; i < n; i++) row[i] = from[i] + (i < step ? 0 : row[i - step]);
            return DONE;
        case UP:
            for (size_t i = 0; i < n; i++) row[i] = from[i] + above[i];
            return DONE;
        case AVERAGE: {
            uint8_t left[4] = {0};
            for (size_t i = 0; i < n; i += step)
                for (size_t c = 0; c < step; c++)
                    left[c] = row[i + c] = from[i + c] + ((left[c] + above[i + c]) >> 1);
            return DONE;
        }
        case PAETH: {
            uint8_t left[4] = {0}, corner[4] = {0};
            for (size_t i = 0; i < n; i += step)
                for (size_t c = 0; c < step; c++) {
                    left[c] = row[i + c] = from[i + c] + nearest(left[c], above[i + c], corner[c]);
                    corner[c] = above[i + c];
                }
            return DONE;
        }
        default:
            return DAMAGED;
    }
}

static int unfilter_row(const uint8_t *from, const uint8_t *above, uint8_t *row, size_t n,
                        int channels) {
    switch (channels) {
        case 1: return unfilter(*from, from + 1, above, row, n, 1);
        case 2: return unfilter(*from, from + 1, above, row, n, 2);
        case 3: return unfilter(*from, from + 1, above, row, n, 3);
        default: return unfilter(*from, from + 1, above, row, n, 4);
    }
}

static void write_rgb(const uint8_t *row, int32_t width, int channels, uint8_t *out) {
    if (channels == 3) {
        memcpy(out, row, (size_t)width * 3);
        return;
    }
    const int green = channels > 2 ? 1 : 0, blue = channels > 2 ? 2 : 0;
    for (int32_t x = 0; x < width; x++, row += channels, out += 3) {
        out[0] = row[0];
        out[1] = row[green];
        out[2] = row[blue];
    }
}

int stoker_png_pixels(const uint8_t *filtered, int32_t height, int32_t width, int32_t channels,
                      uint8_t *out, char *message) {
    if (channels < 1 || channels > 4) {
        snprintf(message, MESSAGE, "%d channels: a PNG has 1 to 4", (int)channels);
        return WRONG;
    }
    const size_t n = (size_t)width * channels;
    uint8_t *const rows = calloc(2, n);  // above the first row are zeros
    if (!rows) {
        snprintf(message, MESSAGE, "no memory");
        return NO_MEMORY;
    }
    uint8_t *above = rows, *row = rows + n;
    int outcome = DONE;
    for (int32_t y = 0; y < height; y++, filtered += n + 1) {
        outcome = unfilter_row(filtered, above, row, n, channels);
        if (outcome != DONE) {
            snprintf(message, MESSAGE, "row %d of the PNG has filter %d", (int)y, *filtered);
            break;
        }
        write_rgb(row, width, channels, out + (size_t)y * width * 3);
        uint8_t *const done = row;
        row = above;
        above = done;
    }
    free(rows);
    return outcome;
}
