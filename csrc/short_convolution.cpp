// Entry points of the short convolution, called through ctypes: src/fastweights/ops/short_convolution/cpu.py checks every
// argument before a pointer comes here.
#include "short_convolution.hpp"

#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    TARGET void forward_##NAME(const ShortProblem& p, const ShortInputs<T>& in, int item, T* outputs) {                \
        ShortConvolution<T, BYTES>(p, in, item).forward(outputs);                                                      \
    }                                                                                                                  \
    TARGET void backward_##NAME(const ShortProblem& p, const ShortInputs<T>& in, int item, const T* grad_outputs,      \
                                const ShortGradients<T>& out) {                                                        \
        ShortConvolution<T, BYTES>(p, in, item).backward(grad_outputs, out);                                           \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)

int count_items(const ShortProblem& p) { return static_cast<int>(p.batch * ((p.steps + short_block - 1) / short_block)); }

template <class T>
void forward(const ShortProblem& p, const ShortInputs<T>& in, T* outputs, int threads) {
    parallel_for(count_items(p), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(forward, p, in, item, outputs);
    });
}

template <class T>
void backward(const ShortProblem& p, const ShortInputs<T>& in, const T* grad_outputs, const ShortGradients<T>& out,
              int threads) {
    parallel_for(count_items(p), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(backward, p, in, item, grad_outputs, out);
    });
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_short_convolution_forward_##SUFFIX(                                            \
        const fastweights::ShortProblem* problem, const fastweights::ShortInputs<T>* inputs, T* outputs, int threads) { \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, outputs, threads); });           \
    }                                                                                                                 \
    FASTWEIGHTS_EXPORT int fastweights_short_convolution_backward_##SUFFIX(                                           \
        const fastweights::ShortProblem* problem, const fastweights::ShortInputs<T>* inputs, const T* grad_outputs,   \
        const fastweights::ShortGradients<T>* gradients, int threads) {                                               \
        return fastweights::guarded([&] {                                                                             \
            fastweights::backward<T>(*problem, *inputs, grad_outputs, *gradients, threads);                           \
        });                                                                                                           \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
