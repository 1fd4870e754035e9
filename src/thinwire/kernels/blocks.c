/* Passes over many tensors ("pieces") in blocks: error feedback, encoding and residual in one, decoding, adding,
 * and the middle of a two-shot exchange.
 *
 * Each piece begins a new block, and its last block is padded with zeros. All passes of one block run before the
 * next one begins, so that it stays in the core's L1 cache. torch passes over memory six to ten times for the same
 * work, and maps new pages in each pass (benchmarks/twoshot.py compares both).
 */
#include "kernels.h"

EXPORT int32_t tw_abi(void) { return ABI; }

/* Whether all numbers are finite. Infinity and NaN have the largest magnitudes as integers, so a maximum of bits finds
 * them. A sum would also overflow for huge finite numbers. */
CLONES EXPORT int32_t tw_finite(const float *x, int64_t n) { return largest_magnitude(x, n) < INFINITE; }

/* In the order of `blocks.KINDS` in Python. */
static const Kind *const kinds[] = {&INT8, &INT4, &SIGN, &E4M3, &E5M2, &INT2};

typedef struct {
    int64_t count;          /* of pieces */
    const int64_t *lengths; /* of each piece */
    float *const *values;
    float *const *residuals; /* or NULL: nothing is added to the values */
    float *const *errors;    /* or NULL: not wanted */
    float keep;              /* factor of the residuals */
} Pieces;

/* x = value + keep * residual. The product is rounded before the sum, as by two operations of torch. */
CLONES static void correct(const float *value, const float *residual, float keep, int64_t n, float *into) {
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) into[i] = value[i] + keep * residual[i];
}

/* A division, not a multiplication by the reciprocal, which rounds differently where the world size is no power of
 * 2. */
CLONES static void divide(float *x, int64_t n, float by) {
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) x[i] = x[i] / by;
}

/* Write value + keep * residual of a block and zeros for its padding. */
static void load(const Pieces *all, int64_t piece, int64_t start, int64_t n, int64_t width, float *into) {
    const float *value = all->values[piece] + start;
    if (all->residuals)
        correct(value, all->residuals[piece] + start, all->keep, n, into);
    else
        memcpy(into, value, (size_t)n * sizeof *into);
    memset(into + n, 0, (size_t)(width - n) * sizeof *into);
}

/* Encode a block and write its errors, which must not run over the end of a piece. */
static float encode_block(const Kind *kind, const Pieces *all, int64_t piece, int64_t start, int64_t n, int64_t width,
                          const float *x, uint8_t *codes, float factor, float *scratch) {
    if (!all->errors) return kind->encode(x, n, width, codes, NULL, factor, scratch + width);
    float *error = all->errors[piece] + start;
    if (n == width) return kind->encode(x, n, width, codes, error, factor, scratch + width);
    float scale = kind->encode(x, n, width, codes, scratch, factor, scratch + width);
    memcpy(error, scratch, (size_t)n * sizeof *error);
    return scale;
}

/* `scratch` has room for two blocks. */
EXPORT void tw_encode(int32_t which, int64_t width, const Pieces *all, float *scales, uint8_t *codes, float *scratch) {
    const Kind *kind = kinds[which];
    int64_t bytes = width * kind->bits / 8;
    for (int64_t piece = 0; piece < all->count; piece++) {
        for (int64_t start = 0; start < all->lengths[piece]; start += width) {
            int64_t n = smaller(width, all->lengths[piece] - start);
            const float *x = all->values[piece] + start;
            if (all->residuals || n < width) {
                load(all, piece, start, n, width, scratch);
                x = scratch;
            }
            *scales++ = encode_block(kind, all, piece, start, n, width, x, codes, 1.0f, scratch);
            codes += bytes;
        }
    }
}

/* Encode (value + keep * residual + the decoded `received` encodings) / world.
 *
 * The owner's own numbers enter the mean without being encoded. `received` are added in the order of ranks, so the
 * sum has the same bits on every processor. Errors are multiplied by world: the owner feeds back the error of the
 * mean through its own residual, which has a weight of 1 / world in the next mean. */
EXPORT void tw_mean_encode(int32_t which, int64_t width, const Pieces *all, int64_t received,
                           const float *const *received_scales, const uint8_t *const *received_codes, float world,
                           float *scales, uint8_t *codes, float *scratch) {
    const Kind *kind = kinds[which];
    int64_t bytes = width * kind->bits / 8, block = 0;
    for (int64_t piece = 0; piece < all->count; piece++) {
        for (int64_t start = 0; start < all->lengths[piece]; start += width, block++) {
            int64_t n = smaller(width, all->lengths[piece] - start);
            load(all, piece, start, n, width, scratch);
            for (int64_t i = 0; i < received; i++)
                kind->add(received_scales[i][block], received_codes[i] + block * bytes, n, width, scratch, 1.0f);
            divide(scratch, n, world);
            scales[block] =
                encode_block(kind, all, piece, start, n, width, scratch, codes + block * bytes, world, scratch);
        }
    }
}

EXPORT void tw_decode(int32_t which, int64_t width, int64_t count, const int64_t *lengths, float *const *into,
                      const float *scales, const uint8_t *codes) {
    const Kind *kind = kinds[which];
    int64_t bytes = width * kind->bits / 8;
    for (int64_t piece = 0; piece < count; piece++)
        for (int64_t start = 0; start < lengths[piece]; start += width, codes += bytes)
            kind->decode(*scales++, codes, smaller(width, lengths[piece] - start), width, into[piece] + start);
}

EXPORT void tw_add(int32_t which, int64_t width, int64_t count, const int64_t *lengths, float *const *into,
                   const float *scales, const uint8_t *codes, float weight) {
    const Kind *kind = kinds[which];
    int64_t bytes = width * kind->bits / 8;
    for (int64_t piece = 0; piece < count; piece++)
        for (int64_t start = 0; start < lengths[piece]; start += width, codes += bytes)
            kind->add(*scales++, codes, smaller(width, lengths[piece] - start), width, into[piece] + start, weight);
}
