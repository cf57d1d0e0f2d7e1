// Entry points of the pooling, called through ctypes: src/fastweights/ops/conv_block checks every argument before
// a pointer comes here.
#include "pooling.hpp"

#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                          \
    TARGET void forward_##NAME(const PoolingProblem& problem, const T* images, T* pooled,                    \
                               std::uint8_t* codes, std::int64_t image) {                                    \
        Pooling<T>{problem}.forward(images, pooled, codes, image);                                           \
    }                                                                                                        \
    TARGET void spread_##NAME(const PoolingProblem& problem, const T* gradients, const std::uint8_t* codes,  \
                              T* images, std::int64_t image) {                                               \
        Pooling<T>{problem}.spread(gradients, codes, images, image);                                         \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, BFloat16)

template <class T>
void forward(const PoolingProblem& problem, const T* images, T* pooled, std::uint8_t* codes, int image) {
    FASTWEIGHTS_DISPATCH(forward, problem, images, pooled, codes, image);
}

template <class T>
void spread(const PoolingProblem& problem, const T* gradients, const std::uint8_t* codes, T* images, int image) {
    FASTWEIGHTS_DISPATCH(spread, problem, gradients, codes, images, image);
}

// An image is an item of work.
template <class Task>
int for_each_image(const PoolingProblem& problem, Task task) {
    return guarded([&] { parallel_for(int(problem.images), int(problem.threads), task); });
}

}  // namespace
}  // namespace fastweights

using fastweights::BFloat16;
using fastweights::for_each_image;
using fastweights::PoolingProblem;

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                   \
    FASTWEIGHTS_EXPORT int fastweights_pooling_forward_##SUFFIX(const PoolingProblem* problem, const T* images,        \
                                                                T* pooled, std::uint8_t* codes) {                      \
        return for_each_image(*problem, [&](int i) { fastweights::forward(*problem, images, pooled, codes, i); });     \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_pooling_spread_##SUFFIX(const PoolingProblem* problem, const T* gradients,      \
                                                               const std::uint8_t* codes, T* images) {                 \
        return for_each_image(*problem, [&](int i) { fastweights::spread(*problem, gradients, codes, images, i); });   \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
FASTWEIGHTS_ENTRY(BFloat16, bfloat16)
