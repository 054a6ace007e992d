// The part of an image that a crop reads.
#pragma once
#include "resample.h"

struct crop;

struct region {
    int left, top, right, bottom;
    struct target to;  // with a box that is relative to the region
};

int region_of(const struct crop *crop, double width, double height, struct region *found,
              char *message);
