// Entry points of the delta family, called through ctypes: src/fastweights/ops/delta/cpu.py checks every argument
// before a pointer comes here.
#include "delta_backward.hpp"
#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

// A slice of the heads of a sequence is an item of work, and nothing is summed over items: the same bits on any number of
// threads.
template <class T>
void forward(const DeltaProblem& p, const DeltaInputs<T>& in, const DeltaResults<T>& out, int threads) {
    check_numbers(p, in);
    const std::int64_t items = p.batch * (is_one_step(p, in, out) ? p.heads : p.key_heads * count_slices(p));
    parallel_for(static_cast<int>(items), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(forward, p, in, item, out);
    });
}

template <class T>
void backward(const DeltaProblem& p, const DeltaInputs<T>& in, const T* trace, const T* grad_outputs,
              const T* grad_final, const DeltaGradients<T>& out, int threads) {
    parallel_for(static_cast<int>(p.batch * p.key_heads * count_slices(p)), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(backward, p, in, item, trace, grad_outputs, grad_final, out);
    });
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                   \
    FASTWEIGHTS_EXPORT int fastweights_delta_forward_##SUFFIX(                                                         \
        const fastweights::DeltaProblem* problem, const fastweights::DeltaInputs<T>* inputs,                           \
        const fastweights::DeltaResults<T>* results, int threads) {                                                    \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, *results, threads); });           \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_delta_backward_##SUFFIX(                                                        \
        const fastweights::DeltaProblem* problem, const fastweights::DeltaInputs<T>* inputs, const T* trace,           \
        const T* grad_outputs, const T* grad_final, const fastweights::DeltaGradients<T>* gradients, int threads) {    \
        return fastweights::guarded([&] {                                                                              \
            fastweights::backward<T>(*problem, *inputs, trace, grad_outputs, grad_final, *gradients, threads);         \
        });                                                                                                            \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
