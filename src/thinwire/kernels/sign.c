/* One bit per number, its sign bit, and the mean magnitude of the block.
 *
 * Bit e of the bytes holds the e-th eighth of a block. A mean depends on the order of its additions, so the order
 * is fixed: the second half of the magnitudes is added to the first until one is left.
 */
#include "kernels.h"

CLONES static float encode1(const float *x, int64_t n, int64_t width, uint8_t *codes, float *error, float factor,
                            float *scratch) {
    INDEPENDENT
    for (int64_t i = 0; i < width; i++) scratch[i] = float_of(magnitude_bits(x[i]));
    for (int64_t left = width; left > 1;) {
        int64_t half = (left + 1) / 2;
        INDEPENDENT
        for (int64_t i = 0; i < left - half; i++) scratch[i] = scratch[i] + scratch[half + i];
        left = half;
    }
    float magnitude = scratch[0] / (float)width;
    /* Padding must not lower the magnitude of a short block. */
    if (n < width) magnitude = magnitude * (float)((double)width / (double)n);

    int64_t eighth = width / 8;
    INDEPENDENT
    for (int64_t i = 0; i < eighth; i++) {
        int32_t byte = 0;
        for (int e = 0; e < 8; e++) byte |= (int32_t)((uint32_t)bits_of(x[e * eighth + i]) >> 31 << e);
        codes[i] = (uint8_t)byte;
    }
    if (error) {
        INDEPENDENT
        for (int64_t i = 0; i < width; i++) {
            float decoded = float_of(bits_of(magnitude) ^ (bits_of(x[i]) & INT32_MIN));
            error[i] = (x[i] - decoded) * factor;
        }
    }
    return magnitude;
}

/* The compiler's own vectors: an eighth of a block is too short for loops that it vectorises by itself. */
typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef uint32_t Ints __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

/* Write plus or minus `scale`, or add them. A one, moved to where a float has its sign, flips that of scale. */
INLINE void expand(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into, int adding) {
    int64_t eighth = width / 8, whole = n == width ? eighth / 8 * 8 : 0;
    uint32_t positive = (uint32_t)bits_of(scale);
    for (int64_t i = 0; i < whole; i += 8) {
        Bytes packed;
        memcpy(&packed, codes + i, sizeof packed);
        Ints wide = __builtin_convertvector(packed, Ints);
        for (int e = 0; e < 8; e++) {
            float *own = into + e * eighth + i;
            Ints bits = (wide << (31 - e) & 0x80000000u) ^ positive;
            Floats old, new;
            memcpy(&new, &bits, sizeof new);
            if (adding) {
                memcpy(&old, own, sizeof old);
                new = old + new;
            }
            memcpy(own, &new, sizeof new);
        }
    }
    for (int e = 0; e < 8; e++) {
        float *own = into + e * eighth;
        int64_t count = smaller(n - e * eighth, eighth);
        for (int64_t i = whole; i < count; i++) {
            float decoded = (codes[i] >> e & 1) ? -scale : scale;
            own[i] = adding ? own[i] + decoded : decoded;
        }
    }
}

CLONES static void decode1(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into) {
    expand(scale, codes, n, width, into, 0);
}

CLONES static void add1(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into, float weight) {
    expand(weight * scale, codes, n, width, into, 1);
}

const Kind SIGN = {1, encode1, decode1, add1};
