// Crops of JPEGs and PNGs whose boxes are given, or drawn at random.
#include <math.h>
#include <string.h>

#include "crops.h"
#include "stoker_native.h"

// ---- random numbers

// NumPy's Philox4x64-10 (Salmon and others, Parallel random numbers: as easy as 1, 2, 3, SC 2011).
struct philox {
    uint64_t key[2], counter[4], made[4];
    int used;  // how many of those that were made
};

static uint64_t high(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }

static void make_more(struct philox *philox) {
    const uint64_t one = 0xD2E7470EE14C6C93, other = 0xCA5A826395121157;
    uint64_t *const x = philox->made, key[2] = {philox->key[0], philox->key[1]};
    philox->counter[0]++;  // no box takes so many numbers that the next word had to be counted up
    memcpy(x, philox->counter, sizeof philox->made);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = high(one, x[0]), b = one * x[0], c = high(other, x[2]), d = other * x[2];
        x[0] = c ^ x[1] ^ key[0];
        x[1] = d;
        x[2] = a ^ x[3] ^ key[1];
        x[3] = b;
        key[0] += 0x9E3779B97F4A7C15;
        key[1] += 0xBB67AE8584CAA73B;
    }
    philox->used = 0;
}

// Uniform in [0, 1), as numpy.random.Generator.random() makes it.
static double uniform(struct philox *philox) {
    if (philox->used == 4) make_more(philox);
    return (double)(philox->made[philox->used++] >> 11) * 0x1p-53;
}

// ---- boxes

enum { TRIES = 10 };

// As stoker.images.cropping.random_box draws it, number by number. Returns 0 where that raises an error:
// where a side is infinite.
static int draw_box(const struct drawing *by, int height, int width, struct philox *philox,
                    struct crop *crop) {
    for (int i = 0; i < TRIES; i++) {
        const double share = by->scale_low + (by->scale_high - by->scale_low) * uniform(philox);
        const double area = (double)((int64_t)height * width) * share;
        const double aspect = exp(by->log_low + (by->log_high - by->log_low) * uniform(philox));
        const double across = rint(sqrt(area * aspect)), down = rint(sqrt(area / aspect));
        if (!isfinite(across) || !isfinite(down)) return 0;
        if (across > 0 && across <= width && down > 0 && down <= height) {
            crop->y = trunc(uniform(philox) * (height - down + 1));
            crop->x = trunc(uniform(philox) * (width - across + 1));
            crop->width = across;
            crop->height = down;
            return 1;
        }
    }
    crop->width = width;
    crop->height = height;
    if (width < by->ratio_low * height)
        crop->height = fmax(1, rint(width / by->ratio_low));
    else if (width > by->ratio_high * height)
        crop->width = fmax(1, rint(height * by->ratio_high));
    crop->x = floor((width - crop->width) / 2);
    crop->y = floor((height - crop->height) / 2);
    return 1;
}

struct draw {
    const struct drawing *by;
    struct philox philox;
};

// A box that is none where it cannot be drawn.
static struct crop drawn(void *self, int height, int width) {
    struct draw *const draw = self;
    struct crop crop = draw->by->like;
    crop.width = 0;
    if (draw_box(draw->by, height, width, &draw->philox, &crop))
        crop.flip = uniform(&draw->philox) < draw->by->flip_p;
    return crop;
}

static struct crop given(void *self, int height, int width) {
    (void)height, (void)width;
    return *(const struct crop *)self;
}

// ---- what the library offers

static int crop_one(const uint8_t *data, size_t size, const struct chooser *chooser,
                    const struct limits *limits, uint8_t *out) {
    char message[MESSAGE];
    return is_png(data, size) ? png_crop(data, size, chooser, limits, out, message)
                              : jpeg_crop(data, size, chooser, limits, out, message);
}

int stoker_jpeg_crop(const uint8_t *data, size_t size, const struct crop *crop,
                     const struct limits *limits, uint8_t *out, char *message) {
    return jpeg_crop(data, size, &(struct chooser){given, (void *)crop}, limits, out, message);
}

void stoker_crop_many(int64_t count, const uint8_t *const *data, const size_t *sizes,
                      const struct crop *crops, const struct limits *limits, uint8_t *const *out,
                      int32_t *outcomes) {
    for (int64_t i = 0; i < count; i++) {
        const struct chooser chooser = {given, (void *)&crops[i]};
        outcomes[i] = crop_one(data[i], sizes[i], &chooser, limits, out[i]);
    }
}

void stoker_random_crops(int64_t count, const uint8_t *const *data, const size_t *sizes,
                         const struct drawing *by, const uint64_t key[2],
                         const uint64_t (*counters)[2], const struct limits *limits,
                         uint8_t *const *out, int32_t *outcomes) {
    for (int64_t i = 0; i < count; i++) {
        struct draw draw = {by, {.key = {key[0], key[1]},
                                 .counter = {0, counters[i][0], counters[i][1]}, .used = 4}};
        const struct chooser chooser = {drawn, &draw};
        outcomes[i] = crop_one(data[i], sizes[i], &chooser, limits, out[i]);
    }
}
