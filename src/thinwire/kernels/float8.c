/* 8-bit floats, with each block scaled to the format's range: e4m3 (bias 7, up to 448) and e5m2 (bias 15, up to
 * 57344).
 *
 * A format's exponent and mantissa are moved to their places in a float32. A multiplication by a power of two
 * corrects the bias, and makes numbers of what were subnormal codes.
 */
#include "kernels.h"

/* Round |x| to `mantissa` bits, ties to even, and return the code without its sign. `bias` is the format's. */
INLINE int32_t code_of(int32_t magnitude, int mantissa, int bias) {
    int drop = 23 - mantissa;
    int32_t smallest = (128 - bias) << 23; /* the smallest normal number */
    /* Near this number the step from one float32 to the next is the format's smallest. */
    float shift = float_of((151 - bias - mantissa) << 23);
    int32_t subnormal = bits_of(float_of(magnitude) + shift) - bits_of(shift);
    int32_t odd = magnitude >> drop & 1;
    int32_t normal = (magnitude - ((127 - bias) << 23) + ((1 << (drop - 1)) - 1) + odd) >> drop;
    return magnitude < smallest ? subnormal : normal;
}

/* From 480 on (0x43f00000), the next value after 448 and a NaN in this format, magnitudes become NaN. */
INLINE uint8_t e4m3_of(float x) {
    int32_t magnitude = magnitude_bits(x), sign = bits_of(x) >> 24 & 0x80;
    int32_t code = magnitude >= 0x43f00000 ? 0x7f : code_of(magnitude, 3, 7);
    return (uint8_t)(sign | code);
}

/* From 65536 on (0x47800000) magnitudes become infinity, and NaN stays NaN. */
INLINE uint8_t e5m2_of(float x) {
    int32_t magnitude = magnitude_bits(x), sign = bits_of(x) >> 24 & 0x80;
    int32_t code = magnitude >= 0x47800000 ? (magnitude > INFINITE ? 0x7f : 0x7c) : code_of(magnitude, 2, 15);
    return (uint8_t)(sign | code);
}

/* The code of NaN becomes 480 instead of NaN. That is harmless: its block has a non-finite scale, and so the
 * product is non-finite. */
INLINE float from_e4m3(uint8_t code) {
    float magnitude = float_of((code & 0x7f) << 20) * 0x1p120f;
    return float_of(bits_of(magnitude) | (int32_t)((uint32_t)(code & 0x80) << 24));
}

INLINE float from_e5m2(uint8_t code) {
    int32_t plain = bits_of(float_of((code & 0x7f) << 21) * 0x1p112f);
    int32_t special = INFINITE | (code & 3) << 21;
    int32_t magnitude = (code & 0x7c) == 0x7c ? special : plain;
    return float_of(magnitude | (int32_t)((uint32_t)(code & 0x80) << 24));
}

/* The functions of a format, with the conversions inlined. */
#define FORMAT(NAME, name, LEVELS)                                                                                \
    CLONES static float encode_##name(const float *x, int64_t n, int64_t width, uint8_t *codes, float *error,     \
                                      float factor, float *scratch) {                                             \
        (void)n, (void)scratch;                                                                                   \
        float most = float_of(largest_magnitude(x, width));                                                       \
        float scale = scale_of(most, LEVELS), inverse = 1.0f / scale;                                             \
        INDEPENDENT                                                                                               \
        for (int64_t i = 0; i < width; i++) codes[i] = name##_of(x[i] * inverse);                                 \
        if (error) {                                                                                              \
            INDEPENDENT                                                                                           \
            for (int64_t i = 0; i < width; i++) error[i] = (x[i] - from_##name(codes[i]) * scale) * factor;       \
        }                                                                                                         \
        return scale;                                                                                             \
    }                                                                                                             \
    CLONES static void decode_##name(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into) {  \
        (void)width;                                                                                              \
        INDEPENDENT                                                                                               \
        for (int64_t i = 0; i < n; i++) into[i] = from_##name(codes[i]) * scale;                                  \
    }                                                                                                             \
    CLONES static void add_##name(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into,       \
                                  float weight) {                                                                 \
        (void)width;                                                                                              \
        INDEPENDENT                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                         \
            float decoded = from_##name(codes[i]) * scale;                                                        \
            into[i] = into[i] + weight * decoded;                                                                 \
        }                                                                                                         \
    }                                                                                                             \
    const Kind NAME = {8, encode_##name, decode_##name, add_##name};

FORMAT(E4M3, e4m3, 448.0f)
FORMAT(E5M2, e5m2, 57344.0f)
