// PNGs of 8 bits a channel (PNG, third edition): zlib inflates them, filters are undone in place.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "crops.h"
#include "stoker_native.h"

enum filter { NONE, SUB, UP, AVERAGE, PAETH };

static inline uint8_t nearest(int left, int above, int corner) {
    const int to_left = abs(above - corner), to_above = abs(left - corner);
    const int to_corner = abs(left + above - 2 * corner);
    const int is_above = to_above < to_left;
    const int value = is_above ? above : left, distance = is_above ? to_above : to_left;
    return (uint8_t)(to_corner < distance ? corner : value);
}

// Undoes the filter of a row of n bytes; `step` is known where this is compiled, which makes it twice
// as fast.
static inline int unfilter(int filter, const uint8_t *restrict above, uint8_t *restrict row, size_t n,
                           const size_t step) {
    switch (filter) {
        case NONE:
            return DONE;
        case SUB:
            for (size_t i = step; i < n; i++) row[i] += row[i - step];
            return DONE;
        case UP:
            for (size_t i = 0; i < n; i++) row[i] += above[i];
            return DONE;
        case AVERAGE: {
            uint8_t left[4] = {0};
            for (size_t i = 0; i < n; i += step)
                for (size_t c = 0; c < step; c++)
                    left[c] = row[i + c] += (left[c] + above[i + c]) >> 1;
            return DONE;
        }
        case PAETH: {
            uint8_t left[4] = {0}, corner[4] = {0};
            for (size_t i = 0; i < n; i += step)
                for (size_t c = 0; c < step; c++) {
                    left[c] = row[i + c] += nearest(left[c], above[i + c], corner[c]);
                    corner[c] = above[i + c];
                }
            return DONE;
        }
        default:
            return DAMAGED;
    }
}

static int unfilter_row(int filter, const uint8_t *above, uint8_t *row, size_t n, int channels) {
    switch (channels) {
        case 1: return unfilter(filter, above, row, n, 1);
        case 2: return unfilter(filter, above, row, n, 2);
        case 3: return unfilter(filter, above, row, n, 3);
        default: return unfilter(filter, above, row, n, 4);
    }
}

// Writes the colours of a row: grey three times, and no alpha.
static void write_rgb(const uint8_t *row, int width, int channels, uint8_t *out) {
    if (channels == 3) {
        memcpy(out, row, (size_t)width * 3);
        return;
    }
    const int green = channels > 2 ? 1 : 0, blue = channels > 2 ? 2 : 0;
    for (int x = 0; x < width; x++, row += channels, out += 3) {
        out[0] = row[0];
        out[1] = row[green];
        out[2] = row[blue];
    }
}

// ---- files

static const char BEGIN[] = "\x89PNG\r\n\x1a\n\0\0\0\rIHDR";

enum {
    SIGNATURE = 8,
    HEADER = 33,  // bytes of the signature and the first chunk
    AROUND = 12,  // bytes of a chunk beside what it holds: its length and name, and a check behind
};

struct png {
    int height, width, channels;
    size_t row_bytes;  // with the filter
    uint8_t *memory;   // zeros, which are above the first row, and the rows: [1 + height][row_bytes]
};

int is_png(const uint8_t *data, size_t size) {
    return size >= HEADER && !memcmp(data, BEGIN, sizeof BEGIN - 1);
}

static uint32_t word(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static int refuse(char *message) {
    snprintf(message, MESSAGE, "no PNG of 8 bits a channel without a palette, or a damaged one");
    return DAMAGED;
}

static int no_memory(char *message) {
    snprintf(message, MESSAGE, "no memory");
    return NO_MEMORY;
}

static int read_header(struct png *png, const uint8_t *data, size_t size, char *message) {
    static const int channels[] = {1, 0, 3, 0, 2, 0, 4};  // of the colour types, but for palettes
    if (!is_png(data, size)) return refuse(message);
    const uint8_t *const about = data + sizeof BEGIN - 1;
    const uint32_t width = word(about), height = word(about + 4);
    const int bits = about[8], colours = about[9], is_odd = about[10] || about[11] || about[12];
    if (!width || !height || width > INT_MAX || height > INT_MAX || bits != 8 || colours > 6 ||
        !channels[colours] || is_odd)
        return refuse(message);
    png->width = (int)width;
    png->height = (int)height;
    png->channels = channels[colours];
    png->row_bytes = 1 + (size_t)width * png->channels;
    return DONE;
}

// Inflates all parts of a file's stream. Returns whether it fills so many bytes, and ends there.
static int inflate_parts(z_stream *stream, const uint8_t *data, size_t size, uint64_t bytes) {
    int status = Z_OK, is_begun = 0;
    for (size_t at = SIGNATURE;;) {
        const uint8_t *const chunk = data + at;
        const size_t left = size - at;
        if (left < 8) return 0;
        const size_t length = word(chunk);
        const int is_part = !memcmp(chunk + 4, "IDAT", 4);
        if (is_begun && !is_part) return status == Z_STREAM_END && stream->total_out == bytes;
        if (left < AROUND || length > left - AROUND) return 0;
        if (is_part && status != Z_STREAM_END) {
            is_begun = 1;
            stream->next_in = (Bytef *)chunk + 8;
            stream->avail_in = (uInt)length;
            status = inflate(stream, Z_FINISH);
            const int goes_on = status == Z_BUF_ERROR && stream->avail_out;
            if (status != Z_STREAM_END && !goes_on) return 0;
        } else if (!is_part) {  // the stream has a check of its own
            const int is_animated = !memcmp(chunk + 4, "acTL", 4);
            if (is_animated || word(chunk + 8 + length) != crc32(0, chunk + 4, (uInt)length + 4))
                return 0;
        }
        at += length + AROUND;
    }
}

static uint8_t *row_of(const struct png *png, int y) {
    return png->memory + (1 + (size_t)y) * png->row_bytes + 1;
}

// Decodes all rows. Gives the memory back unless it is DONE.
static int open_png(struct png *png, const uint8_t *data, size_t size, const struct limits *limits,
                    char *message) {
    const int outcome = read_header(png, data, size, message);
    if (outcome != DONE) return outcome;
    const uint64_t bytes = (uint64_t)png->height * png->row_bytes;
    const int is_large = (uint64_t)png->width * png->height > (uint64_t)limits->pixels;
    if (is_large || bytes >= UINT_MAX) return refuse(message);  // zlib does not count further
    png->memory = malloc(png->row_bytes + bytes + 1);
    if (!png->memory) return no_memory(message);
    memset(png->memory, 0, png->row_bytes);
    // Room for a byte more than there are pixels, whatever the stream holds.
    z_stream stream = {.next_out = png->memory + png->row_bytes, .avail_out = (uInt)bytes + 1};
    int is_sound = inflateInit(&stream) == Z_OK;
    if (is_sound) {
        is_sound = inflate_parts(&stream, data, size, bytes);
        inflateEnd(&stream);
    }
    for (int y = 0; is_sound && y < png->height; y++) {
        uint8_t *const row = row_of(png, y);
        is_sound = unfilter_row(row[-1], row - png->row_bytes, row, png->row_bytes - 1,
                                png->channels) == DONE;
    }
    if (is_sound) return DONE;
    free(png->memory);
    return refuse(message);
}

static void write_all(const struct png *png, uint8_t *out) {
    for (int y = 0; y < png->height; y++)
        write_rgb(row_of(png, y), png->width, png->channels, out + (size_t)y * png->width * 3);
}

// ---- what the library offers

int stoker_png_size(const uint8_t *data, size_t size, int32_t found[3], char *message) {
    struct png png;
    const int outcome = read_header(&png, data, size, message);
    if (outcome != DONE) return outcome;
    found[0] = png.height;
    found[1] = png.width;
    found[2] = png.channels;
    return DONE;
}

int stoker_png_decode(const uint8_t *data, size_t size, const struct limits *limits, uint8_t *out,
                      char *message) {
    struct png png;
    const int outcome = open_png(&png, data, size, limits, message);
    if (outcome != DONE) return outcome;
    write_all(&png, out);
    free(png.memory);
    return DONE;
}

int png_crop(const uint8_t *data, size_t size, const struct chooser *chooser,
             const struct limits *limits, uint8_t *out, char *message) {
    struct png png;
    int outcome = open_png(&png, data, size, limits, message);
    if (outcome != DONE) return outcome;
    const struct crop crop = chooser->choose(chooser->self, png.height, png.width);
    uint8_t *const rgb = png.channels == 3 ? NULL : malloc((size_t)png.width * png.height * 3);
    if (rgb) write_all(&png, rgb);
    if (rgb || png.channels == 3)
        outcome = stoker_pixels_crop(rgb ? rgb : row_of(&png, 0), png.height, png.width, 3,
                                     rgb ? png.width * (int64_t)3 : (int64_t)png.row_bytes, &crop,
                                     out, message);
    else
        outcome = no_memory(message);
    free(rgb);
    free(png.memory);
    return outcome;
}
