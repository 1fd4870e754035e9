/* Symmetric integers of 8 or 4 bits: scale = most / levels, code = round(x / scale).
 *
 * Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, as rint does, and leaves the
 * integer in the low bits of the sum. It vectorises on every processor. It rounds -0.3 to +0, as decoding the
 * integer 0 does, so that errors computed from the rounded float equal those of the decoded code.
 */
#include "kernels.h"

#define ROUNDER 12582912.0f

/* A block with a non-finite number: all codes are zero, the scale and every error are non-finite. Ranks detect
 * the overflow from the scale alone. */
INLINE float give_up(float most, float levels, int64_t width, int64_t bytes, uint8_t *codes, float *error) {
    memset(codes, 0, (size_t)bytes);
    if (error)
        for (int64_t i = 0; i < width; i++) error[i] = float_of(INFINITE) - float_of(INFINITE);
    return scale_of(most, levels);
}

INLINE float missed(float x, float rounded, float scale, float factor) {
    float decoded = rounded * scale;
    return (x - decoded) * factor;
}

CLONES static float encode8(const float *x, int64_t n, int64_t width, uint8_t *codes, float *error, float factor,
                            float *scratch) {
    (void)n, (void)scratch;
    int32_t bits = largest_magnitude(x, width);
    float most = float_of(bits);
    if (bits >= INFINITE) return give_up(most, 127.0f, width, width, codes, error);
    float scale = scale_of(most, 127.0f), inverse = 1.0f / scale;
    if (!error) {
        INDEPENDENT
        for (int64_t i = 0; i < width; i++) codes[i] = (uint8_t)bits_of(x[i] * inverse + ROUNDER);
        return scale;
    }
    INDEPENDENT
    for (int64_t i = 0; i < width; i++) {
        float own = x[i], shifted = own * inverse + ROUNDER;
        codes[i] = (uint8_t)bits_of(shifted);
        error[i] = missed(own, shifted - ROUNDER, scale, factor);
    }
    return scale;
}

CLONES static void decode8(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into) {
    (void)width;
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) into[i] = (float)(int8_t)codes[i] * scale;
}

CLONES static void add8(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into, float weight) {
    (void)width;
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) {
        float decoded = (float)(int8_t)codes[i] * scale;
        into[i] = into[i] + weight * decoded;
    }
}

const Kind INT8 = {8, encode8, decode8, add8};

/* The first half of a block is in the lower bits of its bytes, the second half in the upper. */

CLONES static float encode4(const float *x, int64_t n, int64_t width, uint8_t *codes, float *error, float factor,
                            float *scratch) {
    (void)n, (void)scratch;
    int64_t half = width / 2;
    int32_t bits = largest_magnitude(x, width);
    float most = float_of(bits);
    if (bits >= INFINITE) return give_up(most, 7.0f, width, half, codes, error);
    float scale = scale_of(most, 7.0f), inverse = 1.0f / scale;
    if (!error) {
        INDEPENDENT
        for (int64_t i = 0; i < half; i++) {
            int32_t low = bits_of(x[i] * inverse + ROUNDER), high = bits_of(x[half + i] * inverse + ROUNDER);
            codes[i] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
        return scale;
    }
    INDEPENDENT
    for (int64_t i = 0; i < half; i++) {
        float own = x[i], other = x[half + i];
        float low = own * inverse + ROUNDER, high = other * inverse + ROUNDER;
        codes[i] = (uint8_t)((bits_of(low) & 15) | (bits_of(high) & 15) << 4);
        error[i] = missed(own, low - ROUNDER, scale, factor);
        error[half + i] = missed(other, high - ROUNDER, scale, factor);
    }
    return scale;
}

/* Signed values of the lower and the upper four bits. */
INLINE float lower(uint8_t code) { return (float)((code & 15) - ((code & 8) << 1)); }
INLINE float upper(uint8_t code) { return (float)((int8_t)code >> 4); }

CLONES static void decode4(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into) {
    int64_t half = width / 2, first = smaller(n, half);
    INDEPENDENT
    for (int64_t i = 0; i < first; i++) into[i] = lower(codes[i]) * scale;
    INDEPENDENT
    for (int64_t i = 0; i < n - half; i++) into[half + i] = upper(codes[i]) * scale;
}

CLONES static void add4(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into, float weight) {
    int64_t half = width / 2, first = smaller(n, half);
    INDEPENDENT
    for (int64_t i = 0; i < first; i++) {
        float decoded = lower(codes[i]) * scale;
        into[i] = into[i] + weight * decoded;
    }
    INDEPENDENT
    for (int64_t i = 0; i < n - half; i++) {
        float decoded = upper(codes[i]) * scale;
        into[half + i] = into[half + i] + weight * decoded;
    }
}

const Kind INT4 = {4, encode4, decode4, add4};
