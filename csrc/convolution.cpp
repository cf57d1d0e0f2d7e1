// Entry points of the convolution, called through ctypes: src/fastweights/ops/conv_block checks every argument
// before a pointer comes here.
#include "convolution.hpp"

#include <vector>

#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

template <class T>
using Wide = decltype(widened(T()));

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                   \
    TARGET void forward_##NAME(const ConvolutionProblem& problem, const T* images, const Wide<T>* weights, T* pooled, \
                               std::uint8_t* codes, Wide<T>* room, std::int64_t image) {                              \
        Convolution<T, BYTES>{problem}.forward(images, weights, pooled, codes, room, image);                          \
    }                                                                                                                 \
    TARGET void backward_##NAME(const ConvolutionProblem& problem, const T* gradients, const std::uint8_t* codes,     \
                                const T* images, Wide<T>* weights, Wide<T>* room, std::int64_t image) {               \
        Convolution<T, BYTES>{problem}.backward(gradients, codes, images, weights, room, image);                      \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, BFloat16)

template <class T>
void forward(const ConvolutionProblem& problem, const T* images, const Wide<T>* weights, T* pooled,
             std::uint8_t* codes, Wide<T>* room, int image) {
    FASTWEIGHTS_DISPATCH(forward, problem, images, weights, pooled, codes, room, image);
}

template <class T>
void backward(const ConvolutionProblem& problem, const T* gradients, const std::uint8_t* codes, const T* images,
              Wide<T>* weights, Wide<T>* room, int image) {
    FASTWEIGHTS_DISPATCH(backward, problem, gradients, codes, images, weights, room, image);
}

// An image is an item of work; task(image, room).
template <class T, class Task>
int for_each_image(const ConvolutionProblem& problem, Task task) {
    return guarded([&] {
        const auto size = Convolution<T, 64>{problem}.room();  // the most of any level
        parallel_for(int(problem.images), int(problem.threads), [&](int image) {
            std::vector<Wide<T>> room(size);
            task(image, room.data());
        });
    });
}

}  // namespace
}  // namespace fastweights

using fastweights::BFloat16;
using fastweights::ConvolutionProblem;
using fastweights::for_each_image;
using fastweights::Wide;

// `per_image` is how many numbers the weights of all blocks take.
#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_convolution_forward_##SUFFIX(                                                  \
        const ConvolutionProblem* problem, const T* images, const Wide<T>* weights, T* pooled, std::uint8_t* codes) { \
        return for_each_image<T>(*problem, [&](int i, Wide<T>* room) {                                                \
            fastweights::forward(*problem, images, weights, pooled, codes, room, i);                                  \
        });                                                                                                           \
    }                                                                                                                 \
    FASTWEIGHTS_EXPORT int fastweights_convolution_backward_##SUFFIX(                                                 \
        const ConvolutionProblem* problem, const T* gradients, const std::uint8_t* codes, const T* images,            \
        Wide<T>* weights, std::int64_t per_image) {                                                                   \
        return for_each_image<T>(*problem, [&](int i, Wide<T>* room) {                                                \
            fastweights::backward(*problem, gradients, codes, images, weights + i * per_image, room, i);              \
        });                                                                                                           \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
FASTWEIGHTS_ENTRY(BFloat16, bfloat16)
