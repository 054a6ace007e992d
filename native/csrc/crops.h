// Crops of files, each by its format.
#pragma once
#include "stoker_native.h"

// Says which crop an image of this size gets.
struct chooser {
    struct crop (*choose)(void *self, int height, int width);
    void *self;
};

// They write RGB [out_height][out_width][3].
int jpeg_crop(const uint8_t *data, size_t size, const struct chooser *chooser,
              const struct limits *limits, uint8_t *out, char *message);
int png_crop(const uint8_t *data, size_t size, const struct chooser *chooser,
             const struct limits *limits, uint8_t *out, char *message);

int is_png(const uint8_t *data, size_t size);  // whether it begins like one
