#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>
#include <jerror.h>

#include "crops.h"
#include "region.h"
#include "stoker_native.h"

enum {
    // Columns around a box that are decoded with it: where colour is kept at a lower resolution, it
    // is interpolated from its neighbours, which the codec does not know at the edge of a crop. One
    // sample of colour is two columns; a block of sixteen on either side took 2 % of the time.
    EDGE = 2,
    AT_ONCE = 4,  // rows that the codec hands out in one call, at most
};

// One image being decoded, and everything that must be given back whatever happens.
struct decoder {
    struct jpeg_decompress_struct codec;
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    int outcome;
    char *message;
    const struct limits *limits;
    struct plan *plan;

    // The last rows of the region that were decoded, `kept` of them, in a circle.
    uint8_t *rows;
    int kept;
    size_t row_bytes;
    int skipped_columns;  // before the region's first
    int next, height;     // how many rows of the region were decoded, and how many there are
    uint8_t *own;         // what is to be freed: `rows`, if it is not the caller's
    uint8_t *raw;         // rows as the codec makes them, where those are no RGB
};

// ---- what the codec calls

static void fail(struct decoder *d, int outcome) {
    d->outcome = outcome;
    longjmp(d->failed, 1);
}

static void on_error(j_common_ptr codec) {
    struct decoder *d = codec->client_data;
    char words[JMSG_LENGTH_MAX];
    codec->err->format_message(codec, words);
    snprintf(d->message, MESSAGE, "%s", words);
    fail(d, codec->err->msg_code == JERR_OUT_OF_MEMORY ? NO_MEMORY : DAMAGED);
}

static void on_message(j_common_ptr codec, int level) {
    if (level < 0) codec->err->num_warnings++;
}

static void say_nothing(j_common_ptr codec) { (void)codec; }

static void nothing_to_do(j_decompress_ptr codec) { (void)codec; }

static boolean no_more(j_decompress_ptr codec) {
    struct decoder *d = codec->client_data;
    snprintf(d->message, MESSAGE, "the JPEG ends early");
    fail(d, DAMAGED);
    return FALSE;
}

static void skip(j_decompress_ptr codec, long bytes) {
    if (bytes <= 0) return;
    if ((size_t)bytes > codec->src->bytes_in_buffer) no_more(codec);
    codec->src->next_input_byte += bytes;
    codec->src->bytes_in_buffer -= bytes;
}

// Called while all scans of an image are read, before its first row can be made.
static void on_progress(j_common_ptr common) {
    struct decoder *d = common->client_data;
    const j_decompress_ptr codec = (j_decompress_ptr)common;
    const int64_t pixels = (int64_t)codec->image_width * codec->image_height;
    if (pixels * codec->input_scan_number <= d->limits->scan_pixels) return;
    snprintf(d->message, MESSAGE, "%u x %u pixels in at least %d scans: more than %lld times pixel",
             codec->image_width, codec->image_height, codec->input_scan_number,
             (long long)d->limits->scan_pixels);
    fail(d, TOO_LARGE);
}

// ---- begin and end

static void start(struct decoder *d, const uint8_t *data, size_t size, char *message) {
    memset(d, 0, sizeof *d);
    d->message = message;
    d->codec.client_data = d;
    d->codec.err = jpeg_std_error(&d->errors);
    d->errors.error_exit = on_error;
    d->errors.emit_message = on_message;
    d->errors.output_message = say_nothing;
    d->source.init_source = nothing_to_do;
    d->source.fill_input_buffer = no_more;
    d->source.skip_input_data = skip;
    d->source.resync_to_restart = jpeg_resync_to_restart;
    d->source.term_source = nothing_to_do;
    d->source.next_input_byte = data;
    d->source.bytes_in_buffer = size;
}

static void read_header(struct decoder *d) {
    jpeg_create_decompress(&d->codec);  // it keeps client_data
    d->codec.src = &d->source;
    jpeg_read_header(&d->codec, TRUE);
}

static int end(struct decoder *d) {
    jpeg_destroy_decompress(&d->codec);
    free(d->plan);
    free(d->own);
    free(d->raw);
    return d->outcome;
}

static void check_size(struct decoder *d, const struct limits *limits) {
    const int64_t pixels = (int64_t)d->codec.image_width * d->codec.image_height;
    const int components = d->codec.num_components;
    if (pixels > limits->pixels) {
        snprintf(d->message, MESSAGE, "%u x %u pixels: more than %lld", d->codec.image_width,
                 d->codec.image_height, (long long)limits->pixels);
        fail(d, TOO_LARGE);
    }
    if (components != 1 && components != 3 && components != 4) {
        snprintf(d->message, MESSAGE, "%d colour components: no grey, RGB or CMYK", components);
        fail(d, DAMAGED);
    }
    d->limits = limits;
    if (jpeg_has_multiple_scans(&d->codec)) {
        d->progress.progress_monitor = on_progress;
        d->codec.progress = &d->progress;
    }
}

static void *memory(struct decoder *d, size_t bytes) {
    void *made = malloc(bytes);
    if (!made) {
        snprintf(d->message, MESSAGE, "no memory");
        fail(d, NO_MEMORY);
    }
    return made;
}

// ---- rows of a region

// Begin to decode a region of the image as the codec scales it, and keep so many rows of it. If its
// rows are whole ones, all of them are decoded to `whole` where that is given.
static void open_region(struct decoder *d, const struct region *region, int kept, uint8_t *whole) {
    const j_decompress_ptr codec = &d->codec;
    const int is_cmyk = codec->num_components == 4;
    codec->out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(codec);
    const int width = codec->output_width;
    const int from = region->left > EDGE ? region->left - EDGE : 0;
    const int to = region->right < width - EDGE ? region->right + EDGE : width;
    d->skipped_columns = region->left;
    d->height = region->bottom - region->top;
    if (from > 0 || to < width) {
        JDIMENSION first = from, count = to - from;
        jpeg_crop_scanline(codec, &first, &count);
        d->skipped_columns -= first;
    }
    d->row_bytes = (size_t)codec->output_width * 3;
    if (whole && region->right - region->left == width) {
        d->rows = whole;
        d->kept = d->height;
    } else {
        d->rows = d->own = memory(d, kept * d->row_bytes);
        d->kept = kept;
    }
    if (is_cmyk) d->raw = memory(d, (size_t)AT_ONCE * codec->output_width * 4);
    if (region->top > 0) jpeg_skip_scanlines(codec, region->top);
}

static uint8_t *kept_row(struct decoder *d, int y) {
    return d->rows + (size_t)(y % d->kept) * d->row_bytes;
}

// As Pillow does it; Adobe keeps CMYK inverted.
static void rgb_of_cmyk(const uint8_t *from, int pixels, uint8_t *to) {
    for (int i = 0; i < pixels; i++, from += 4, to += 3) {
        const int white = from[3];
        for (int c = 0; c < 3; c++) {
            const int product = (255 - from[c]) * white + 128;
            const int value = white - ((product + (product >> 8)) >> 8);
            to[c] = value < 0 ? 0 : (uint8_t)value;
        }
    }
}

static void decode_more(struct decoder *d) {
    JSAMPROW rows[AT_ONCE];
    const j_decompress_ptr codec = &d->codec;
    const int left = d->height - d->next, wanted = left < AT_ONCE ? left : AT_ONCE;
    for (int k = 0; k < wanted; k++)
        rows[k] = d->raw ? d->raw + (size_t)k * codec->output_width * 4 : kept_row(d, d->next + k);
    const int made = jpeg_read_scanlines(codec, rows, wanted);
    if (!made) no_more(codec);
    for (int k = 0; d->raw && k < made; k++)
        rgb_of_cmyk(rows[k], codec->output_width, kept_row(d, d->next + k));
    d->next += made;
}

static const uint8_t *row_of(void *self, int y) {
    struct decoder *d = self;
    while (d->next <= y) decode_more(d);
    return kept_row(d, y) + (size_t)d->skipped_columns * 3;
}

// ---- what the library offers

int stoker_jpeg_size(const uint8_t *data, size_t size, int32_t found[3], char *message) {
    struct decoder d;
    start(&d, data, size, message);
    if (setjmp(d.failed)) return end(&d);
    read_header(&d);
    found[0] = d.codec.image_height;
    found[1] = d.codec.image_width;
    found[2] = d.codec.num_components;
    return end(&d);
}

int stoker_jpeg_decode(const uint8_t *data, size_t size, const int32_t box[4],
                       const struct limits *limits, uint8_t *out, char *message) {
    struct decoder d;
    start(&d, data, size, message);
    if (setjmp(d.failed)) return end(&d);
    read_header(&d);
    check_size(&d, limits);
    const int64_t left = box[0], top = box[1], width = box[2], height = box[3];
    if (left < 0 || top < 0 || width < 1 || height < 1 || left + width > d.codec.image_width ||
        top + height > d.codec.image_height) {
        snprintf(message, MESSAGE, "a box of %d x %d at (%d, %d) is none of an image of %u x %u",
                 (int)width, (int)height, (int)left, (int)top, d.codec.image_width,
                 d.codec.image_height);
        fail(&d, WRONG);
    }
    const struct region region = {.left = left, .top = top, .right = left + width,
                                  .bottom = top + height};
    open_region(&d, &region, AT_ONCE, out);
    for (int y = 0; y < height; y++) {
        const uint8_t *row = row_of(&d, y);
        if (d.rows != out) memcpy(out + (size_t)y * width * 3, row, (size_t)width * 3);
    }
    return end(&d);
}

// How many eighths of the image suffice for a crop.
static int eighths(const struct crop *crop) {
    int n = 1;
    while (n < 8 && (crop->width * n < crop->out_width * 8.0 ||
                     crop->height * n < crop->out_height * 8.0))
        n *= 2;
    return n;
}

int jpeg_crop(const uint8_t *data, size_t size, const struct chooser *chooser,
              const struct limits *limits, uint8_t *out, char *message) {
    struct decoder d;
    start(&d, data, size, message);
    if (setjmp(d.failed)) return end(&d);
    read_header(&d);
    check_size(&d, limits);
    struct crop scaled = chooser->choose(chooser->self, d.codec.image_height, d.codec.image_width);
    const int n = scaled.dct ? eighths(&scaled) : 8;
    d.codec.scale_num = n;
    d.codec.scale_denom = 8;
    jpeg_calc_output_dimensions(&d.codec);
    scaled.x *= n / 8.0;
    scaled.y *= n / 8.0;
    scaled.width *= n / 8.0;
    scaled.height *= n / 8.0;
    struct region region;
    const int outcome =
        region_of(&scaled, d.codec.output_width, d.codec.output_height, &region, message);
    if (outcome != DONE) fail(&d, outcome);
    struct rows rows = {row_of, &d, region.right - region.left, region.bottom - region.top, 3};
    d.plan = plan_new(&region.to, rows.width, rows.height, 3);
    if (!d.plan) {
        snprintf(message, MESSAGE, "no memory");
        fail(&d, NO_MEMORY);
    }
    open_region(&d, &region, plan_rows_kept(d.plan) + AT_ONCE, NULL);
    region.to.out = out;
    plan_run(d.plan, &region.to, &rows);
    return end(&d);
}
