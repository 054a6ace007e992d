// Bytes of images as the numbers that a network takes, from tables: 256 numbers a channel.
#include <string.h>

#include "stoker_native.h"

// A load of a byte, one of its number and a store: about a cycle, whatever the numbers are.
#define LOOK_UP(type)                                                                        \
    do {                                                                                     \
        const type *const numbers = table;                                                   \
        type *to = (type *)out + image * pixels * channels;                                  \
        if (planes_in) {                                                                     \
            for (int32_t c = 0; c < channels; c++)                                           \
                for (int64_t i = 0; i < pixels; i++) *to++ = numbers[256 * c + *from++];     \
        } else if (planes_out && channels == 3) { /* usual: one pass over the bytes */       \
            type *const red = to, *const green = red + pixels, *const blue = green + pixels; \
            for (int64_t i = 0; i < pixels; i++, from += 3) {                                \
                red[i] = numbers[from[0]];                                                   \
                green[i] = numbers[256 + from[1]];                                           \
                blue[i] = numbers[512 + from[2]];                                            \
            }                                                                                \
        } else if (planes_out) {                                                             \
            for (int32_t c = 0; c < channels; c++)                                           \
                for (int64_t i = 0; i < pixels; i++)                                         \
                    *to++ = numbers[256 * c + from[i * channels + c]];                       \
        } else {                                                                             \
            for (int64_t i = 0; i < pixels; i++)                                             \
                for (int32_t c = 0; c < channels; c++) *to++ = numbers[256 * c + *from++];   \
        }                                                                                    \
    } while (0)

int stoker_look_up_pixels(const uint8_t *bytes, int64_t images, int64_t pixels, int32_t channels,
                          const void *table, int32_t item_bytes, int32_t planes_in,
                          int32_t planes_out, void *out) {
    if (planes_in && !planes_out) return WRONG;
    for (int64_t image = 0; image < images; image++) {
        const uint8_t *from = bytes + image * pixels * channels;
        switch (item_bytes) {
            case 1: LOOK_UP(uint8_t); break;
            case 2: LOOK_UP(uint16_t); break;
            case 4: LOOK_UP(uint32_t); break;
            default: return WRONG;
        }
    }
    return DONE;
}
