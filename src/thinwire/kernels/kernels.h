/* Shared by all kernels: how they are exported and compiled for several processors, and bits of floats.
 *
 * Results must not depend on the processor, and must equal those of the pure-torch path bit by bit: ranks with and
 * without native code train together. So every file is compiled with -ffp-contract=off (no fused multiply-add, which
 * rounds once where two operations round twice), sums are taken in an order that the code fixes, and nothing is
 * compiled with -ffast-math.
 */
#ifndef THINWIRE_KERNELS_H
#define THINWIRE_KERNELS_H

#include <stdint.h>
#include <string.h>

/* Raised whenever a function, its arguments or the list of kinds change. `library.py` has the same number and checks
 * it, because an editable install may hold a library that was built from older sources. */
#define ABI 5

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* CLONES compiles a function for AVX-512, AVX2 and the baseline. The dynamic linker chooses one when the library
 * is loaded. That needs glibc. On aarch64 NEON belongs to the baseline, so one version is enough. Sanitizers
 * define PLAIN, because they cannot instrument what runs while the library is being loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(PLAIN)
#if defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#else
#define CLONES
#endif

/* Tells the compiler that no iteration reads what another one writes. Pointers may still be equal. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define INFINITE 0x7f800000 /* bits of infinity; magnitudes above them are NaN */

INLINE int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE int32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffff; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* An encoding of blocks of `width` numbers, of which the first `n` are real and the others padding.
 * Encoders get all `width` numbers, the padding as zeros. */
typedef struct {
    int bits; /* per number; width * bits is a multiple of 8 */

    /* Encode x and return the block's scale. If `error` is not NULL, write (x - decoded) * factor to all of
     * it; it may be x itself. `scratch` has room for `width` numbers. */
    float (*encode)(const float *x, int64_t n, int64_t width, uint8_t *codes, float *error, float factor,
                    float *scratch);

    /* Write the first n decoded numbers. */
    void (*decode)(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into);

    /* Add `weight` times the first n decoded numbers. */
    void (*add)(float scale, const uint8_t *codes, int64_t n, int64_t width, float *into, float weight);
} Kind;

extern const Kind INT8, INT4, SIGN, E4M3, E5M2, INT2;

/* The bits of the largest magnitude. A NaN beats infinity, and infinity every number. */
INLINE int32_t largest_magnitude(const float *x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t own = magnitude_bits(x[i]);
        most = own > most ? own : most;
    }
    return most;
}

/* The scale of a block: its largest magnitude times 1/levels, which is rounded first, as in torch. It is at least
 * the smallest normal number, because the reciprocal of zero is infinite. A NaN is not less than any number. */
INLINE float scale_of(float most, float levels) {
    float scale = most * (1.0f / levels);
    return scale < 0x1p-126f ? 0x1p-126f : scale;
}

#endif
