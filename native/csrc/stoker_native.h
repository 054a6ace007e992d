// What the library offers. Every function may be called by any number of threads.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Everything else is hidden.
#define OFFERED __attribute__((visibility("default")))

enum outcome {
    DONE = 0,
    DAMAGED = 1,    // no JPEG, or one that ends early or cannot be decoded
    TOO_LARGE = 2,  // more pixels, or more pixels times scans, than the limits say
    NO_MEMORY = 3,
    WRONG = 4,      // an argument
};

enum { MESSAGE = 256 };  // bytes of a message; it is set where the outcome is not DONE

struct limits {
    int64_t pixels;       // of the whole image
    int64_t scan_pixels;  // times the scans that it comes in
};

// A box and what becomes of it.
struct crop {
    double x, y, width, height;
    int32_t out_height, out_width;
    int32_t flip;
    int32_t antialias;
    int32_t beyond;   // whether pixels around the box may have a part in its edge
    int32_t dct;      // whether the codec may make it smaller first, by 2, 4 or 8
};

// How the box of a random resized crop is drawn.
struct drawing {
    struct crop like;                // all but the box and the flip
    double scale_low, scale_high;    // its area, as a part of the image's
    double ratio_low, ratio_high;    // its width over its height
    double log_low, log_high;        // their logarithms, as Python has them
    double flip_p;
};

// Height and width, and the number of colour components.
OFFERED int stoker_jpeg_size(const uint8_t *data, size_t size, int32_t found[3], char *message);

// Writes RGB [height][width][3] of a box whose sides are within the image.
OFFERED int stoker_jpeg_decode(const uint8_t *data, size_t size, const int32_t box[4],
                       const struct limits *limits, uint8_t *out, char *message);

// Writes RGB [out_height][out_width][3]; rows and columns that it is not made of are not decoded.
OFFERED int stoker_jpeg_crop(const uint8_t *data, size_t size, const struct crop *crop,
                     const struct limits *limits, uint8_t *out, char *message);

// The same of pixels [height][width][channels], with so many bytes from row to row.
OFFERED int stoker_pixels_crop(const uint8_t *pixels, int32_t height, int32_t width, int32_t channels,
                       int64_t row_bytes, const struct crop *crop, uint8_t *out, char *message);

// The same of PNGs with 8 bits a channel and without a palette, neither interlaced nor animated: for
// all others it is DAMAGED. Alpha is left out.
OFFERED int stoker_png_size(const uint8_t *data, size_t size, int32_t found[3], char *message);
OFFERED int stoker_png_decode(const uint8_t *data, size_t size, const struct limits *limits, uint8_t *out,
                      char *message);

// Crops of many such JPEGs and PNGs, and the outcome of each.
OFFERED void stoker_crop_many(int64_t count, const uint8_t *const *data, const size_t *sizes,
                      const struct crop *crops, const struct limits *limits, uint8_t *const *out,
                      int32_t *outcomes);

// The same, of boxes and flips that are drawn by NumPy's Philox with a key, and with counters of which
// words 1 and 2 are given.
OFFERED void stoker_random_crops(int64_t count, const uint8_t *const *data, const size_t *sizes,
                         const struct drawing *by, const uint64_t key[2],
                         const uint64_t (*counters)[2], const struct limits *limits,
                         uint8_t *const *out, int32_t *outcomes);

// Reads windows of length + 1 integers from open files, each from a byte of its file on. All but the
// last integer go into its row of inputs [windows][length], all but the first into its row of
// targets. Integers have 1, 2, 4 or 8 bytes; those of 8 are signed. Returns how many windows are
// there: the one behind them is not whole, or there was an error (but not EINTR).
OFFERED int64_t stoker_read_windows(const int32_t *descriptors, const int64_t *starts, int64_t windows,
                            int32_t item_bytes, int32_t is_signed, int64_t length, int64_t *inputs,
                            int64_t *targets);

// Reads regular files, one behind the other, and writes their sizes; returns how many are there. The
// one behind them is no regular file, cannot be read, or does not leave a byte of the capacity.
OFFERED int64_t stoker_read_files(const char *const *paths, int64_t files, uint8_t *out, int64_t capacity,
                          int64_t *sizes);

// Copies the data of NumPy's arrays, of so many bytes each, behind each other. An array holds the
// address of its data so many bytes behind its own.
OFFERED void stoker_copy_rows(const uint8_t *const *arrays, int64_t count, int64_t data_at,
                              int64_t row_bytes, uint8_t *out);

// Copies rows by their numbers behind each other: those of so many that begin stride bytes apart.
OFFERED int stoker_gather_rows(const uint8_t *first, int64_t rows, int64_t stride, int64_t row_bytes,
                               const int64_t *numbers, int64_t count, uint8_t *out);

// Writes table[channel][byte] for each byte of so many images of so many pixels: 256 numbers of 1, 2
// or 4 bytes for each channel. Channels lie beside each other in a pixel, or, where planes_in or
// planes_out says so, one behind the other in an image. Planes do not become pixels.
OFFERED int stoker_look_up_pixels(const uint8_t *bytes, int64_t images, int64_t pixels, int32_t channels,
                          const void *table, int32_t item_bytes, int32_t planes_in,
                          int32_t planes_out, void *out);

OFFERED const char *stoker_paths(void);
OFFERED int stoker_use_path(const char *name);
OFFERED const char *stoker_last_path(void);
