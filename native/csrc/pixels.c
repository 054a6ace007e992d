#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "region.h"
#include "stoker_native.h"

// Whether a crop is one, and which part of an image it reads.
int region_of(const struct crop *crop, double width, double height, struct region *found,
              char *message) {
    const double right = crop->x + crop->width, bottom = crop->y + crop->height;
    const double slack = 1e-6;  // boxes that were calculated
    const int whole = crop->x >= -slack && crop->y >= -slack && crop->width > 0 &&
                      crop->height > 0 && right <= width + slack && bottom <= height + slack;
    if (!whole || crop->out_height < 1 || crop->out_width < 1) {
        snprintf(message, MESSAGE,
                 "a box of %g x %g at (%g, %g), made %d x %d, is none of an image of %g x %g",
                 crop->width, crop->height, crop->x, crop->y, (int)crop->out_width,
                 (int)crop->out_height, width, height);
        return WRONG;
    }
    double x = 0, y = 0;
    if (crop->beyond) {
        x = reach(crop->width, crop->out_width, crop->antialias) + 1;
        y = reach(crop->height, crop->out_height, crop->antialias) + 1;
    }
    const double left = floor(crop->x + slack - x), top = floor(crop->y + slack - y);
    // At least one pixel: of a box that is narrower than the slack, or lies on the image's edge,
    // nothing would be left, and what is read of it would lie outside.
    found->left = (int)fmin(fmax(left, 0), width - 1);
    found->top = (int)fmin(fmax(top, 0), height - 1);
    found->right = (int)fmax(found->left + 1, fmin(width, ceil(right - slack + x)));
    found->bottom = (int)fmax(found->top + 1, fmin(height, ceil(bottom - slack + y)));
    found->to = (struct target){crop->x - found->left, crop->y - found->top, crop->width,
                                crop->height, crop->out_height, crop->out_width, crop->flip,
                                crop->antialias, NULL};
    return DONE;
}

struct array {
    const uint8_t *first;
    int64_t row_bytes;
};

static const uint8_t *row_of(void *self, int y) {
    const struct array *array = self;
    return array->first + y * array->row_bytes;
}

int stoker_pixels_crop(const uint8_t *pixels, int32_t height, int32_t width, int32_t channels,
                       int64_t row_bytes, const struct crop *crop, uint8_t *out, char *message) {
    struct region region;
    const int outcome = region_of(crop, width, height, &region, message);
    if (outcome != DONE) return outcome;
    struct array array = {pixels + region.top * row_bytes + (int64_t)region.left * channels,
                          row_bytes};
    const struct rows rows = {row_of, &array, region.right - region.left,
                              region.bottom - region.top, channels};
    struct plan *plan = plan_new(&region.to, rows.width, rows.height, channels);
    if (!plan) {
        snprintf(message, MESSAGE, "no memory");
        return NO_MEMORY;
    }
    region.to.out = out;
    plan_run(plan, &region.to, &rows);
    free(plan);
    return DONE;
}
