// Windows of integers, read from open files and widened.
#define _POSIX_C_SOURCE 200809L  // pread
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <unistd.h>

#include "stoker_native.h"

enum { CHUNK = 16384 };  // bytes: they stay in the first cache until they are widened, twice

union chunk {
    int8_t i1[CHUNK];
    uint8_t u1[CHUNK];
    int16_t i2[CHUNK / 2];
    uint16_t u2[CHUNK / 2];
    int32_t i4[CHUNK / 4];
    uint32_t u4[CHUNK / 4];
    int64_t i8[CHUNK / 8];
};

// Reads all bytes; returns whether they are there.
static int read_all(int descriptor, uint8_t *out, size_t bytes, int64_t start) {
    while (bytes > 0) {
        const ssize_t got = pread(descriptor, out, bytes, start);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 0;
        out += got;
        bytes -= (size_t)got;
        start += got;
    }
    return 1;
}

#define WIDEN(from) \
    for (int64_t i = 0; i < n; i++) out[i] = from[first + i]; \
    return

static void widen(const union chunk *chunk, int32_t item_bytes, int32_t is_signed, int64_t first,
                  int64_t n, int64_t *out) {
    switch (is_signed ? -item_bytes : item_bytes) {
        case 1: WIDEN(chunk->u1);
        case 2: WIDEN(chunk->u2);
        case 4: WIDEN(chunk->u4);
        case -1: WIDEN(chunk->i1);
        case -2: WIDEN(chunk->i2);
        case -4: WIDEN(chunk->i4);
        case -8: WIDEN(chunk->i8);
    }
}

static int read_window(int descriptor, int64_t start, int32_t item_bytes, int32_t is_signed,
                       int64_t length, int64_t *inputs, int64_t *targets) {
    union chunk chunk;
    const int64_t most = CHUNK / item_bytes, items = length + 1;
    for (int64_t at = 0; at < items; at += most) {
        const int64_t n = items - at < most ? items - at : most;
        if (!read_all(descriptor, chunk.u1, (size_t)(n * item_bytes), start + at * item_bytes))
            return 0;
        const int64_t first = at == 0, last = at + n == items;
        widen(&chunk, item_bytes, is_signed, 0, n - last, inputs + at);
        widen(&chunk, item_bytes, is_signed, first, n - first, targets + at + first - 1);
    }
    return 1;
}

int64_t stoker_read_windows(const int32_t *descriptors, const int64_t *starts, int64_t windows,
                            int32_t item_bytes, int32_t is_signed, int64_t length, int64_t *inputs,
                            int64_t *targets) {
    for (int64_t i = 0; i < windows; i++)
        if (!read_window(descriptors[i], starts[i], item_bytes, is_signed, length,
                         inputs + i * length, targets + i * length))
            return i;
    return windows;
}
