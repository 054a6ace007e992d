// Bilinear resampling of a box of pixels, antialiased where it is made smaller.
#pragma once
#include <stdint.h>

// Where pixels come from, row by row. Rows are asked for in rising order, `taps` at a time.
struct rows {
    const uint8_t *(*at)(void *self, int y);
    void *self;
    int width, height, channels;
};

struct target {
    double x, y, width, height;  // the box, in pixels of the rows
    int out_height, out_width;
    int flip;                    // whether left and right change places
    int antialias;
    uint8_t *out;                // [out_height][out_width][channels]
};

struct plan;  // the weights of both axes, and a row between them

// NULL where there is no memory for it; to be freed.
struct plan *plan_new(const struct target *to, int width, int height, int channels);
int plan_rows_kept(const struct plan *plan);  // how many rows are asked for at once
void plan_run(struct plan *plan, const struct target *to, const struct rows *from);

// How far beyond its box a target reads, in pixels, where it may.
double reach(double length, int outputs, int antialias);
