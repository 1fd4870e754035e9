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

CLONES static void add(float *into, const float *other, int64_t n) {
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) into[i] = into[i] + other[i];
}

/* Encode the mean over ranks: this rank's own numbers, value + keep * residual, and the decoded `received` encodings
 * of the others, in the order of ranks.
 *
 * The owner's own numbers enter the mean without being encoded. Ranks are added in pairs, (0 + 1) + (2 + 3) + ..., and
 * an odd last one is carried over. torch takes a level of that tree in one operation, so that an accelerator launches
 * as many kernels as the tree has levels. Here `stack` holds the sums that wait for their partner, as the ones of a
 * binary counter: rank i completes as many pairs as i has ones at its end.
 *
 * Errors are multiplied by world: the owner feeds back the error of the mean through its own residual, which has a
 * weight of 1 / world in the next mean. `scratch` has room for 2 blocks, and for one more per bit of world. */
EXPORT void tw_mean_encode(int32_t which, int64_t width, const Pieces *all, int64_t rank, int64_t world,
                           const float *const *received_scales, const uint8_t *const *received_codes, float *scales,
                           uint8_t *codes, float *scratch) {
    const Kind *kind = kinds[which];
    int64_t bytes = width * kind->bits / 8, block = 0;
    float *stack = scratch + 2 * width;
    for (int64_t piece = 0; piece < all->count; piece++) {
        for (int64_t start = 0; start < all->lengths[piece]; start += width, block++) {
            int64_t n = smaller(width, all->lengths[piece] - start), sender = 0;
            float *top = stack; /* where the next number goes */
            for (int64_t i = 0; i < world; i++) {
                int64_t pairs = i;
                if (i == rank) {
                    load(all, piece, start, n, width, top);
                    top += width;
                } else {
                    float scale = received_scales[sender][block];
                    const uint8_t *own = received_codes[sender++] + block * bytes;
                    if (i & 1) {
                        kind->add(scale, own, n, width, top - width, 1.0f);
                        pairs >>= 1; /* the first pair is complete */
                    } else {
                        kind->decode(scale, own, n, width, top);
                        top += width;
                    }
                }
                for (; pairs & 1; pairs >>= 1, top -= width) add(top - 2 * width, top - width, n);
            }
            for (; top - stack > width; top -= width) add(top - 2 * width, top - width, n);
            divide(stack, n, (float)world);
            memset(stack + n, 0, (size_t)(width - n) * sizeof *stack);
            scales[block] = encode_block(kind, all, piece, start, n, width, stack, codes + block * bytes, (float)world,
                                         scratch);
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
