// Entry points of the selective scan, called through ctypes: src/fastweights/ops/selective_scan/cpu.py checks every argument
// before a pointer comes here, all but the bounds' numbers.
#include "selective_scan.hpp"

#include "dispatch.hpp"
#include "guarded.hpp"
#include "packed.hpp"
#include "pool.hpp"
#include "state_update.hpp"

namespace fastweights {
namespace {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    TARGET void forward_##NAME(const ScanProblem& p, const ScanInputs<T>& in, int item, const ScanResults<T>& out) {   \
        SelectiveScan<T, BYTES>(p, in, item).forward(out);                                                             \
    }                                                                                                                  \
    TARGET void backward_##NAME(const ScanProblem& p, const ScanInputs<T>& in, int item, const T* trace,               \
                                const T* grad_outputs, const T* grad_final, const ScanGradients<T>& out) {             \
        SelectiveScan<T, BYTES>(p, in, item).backward(trace, grad_outputs, grad_final, out);                           \
    }                                                                                                                  \
    TARGET void update_##NAME(const UpdateProblem& p, const UpdateTensors<T>& t, std::int64_t first, std::int64_t last) { \
        StateUpdate<T, BYTES>::run(p, t, first, last);                                                                 \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)

template <class T>
void forward(const ScanProblem& p, const ScanInputs<T>& in, const ScanResults<T>& out, int threads) {
    check_bounds(in.bounds, p.batch, p.steps);
    parallel_for(static_cast<int>(p.batch * scan_slices), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(forward, p, in, item, out);
    });
}

template <class T>
void backward(const ScanProblem& p, const ScanInputs<T>& in, const T* trace, const T* grad_outputs, const T* grad_final,
              const ScanGradients<T>& out, int threads) {
    parallel_for(static_cast<int>(p.batch * scan_slices), threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(backward, p, in, item, trace, grad_outputs, grad_final, out);
    });
}

template <class T>
void update(const UpdateProblem& p, const UpdateTensors<T>& t, int threads) {
    const std::int64_t rows = p.batch * p.channels;
    parallel_for(threads, threads, [&](int item) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(update, p, t, rows * item / threads, rows * (item + 1) / threads);
    });
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_selective_scan_forward_##SUFFIX(                                               \
        const fastweights::ScanProblem* problem, const fastweights::ScanInputs<T>* inputs,                            \
        const fastweights::ScanResults<T>* results, int threads) {                                                    \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, *results, threads); });          \
    }                                                                                                                 \
    FASTWEIGHTS_EXPORT int fastweights_selective_scan_backward_##SUFFIX(                                              \
        const fastweights::ScanProblem* problem, const fastweights::ScanInputs<T>* inputs, const T* trace,            \
        const T* grad_outputs, const T* grad_final, const fastweights::ScanGradients<T>* gradients, int threads) {    \
        return fastweights::guarded([&] {                                                                             \
            fastweights::backward<T>(*problem, *inputs, trace, grad_outputs, grad_final, *gradients, threads);        \
        });                                                                                                           \
    }                                                                                                                 \
    FASTWEIGHTS_EXPORT int fastweights_selective_scan_update_##SUFFIX(                                                \
        const fastweights::UpdateProblem* problem, const fastweights::UpdateTensors<T>* tensors, int threads) {       \
        return fastweights::guarded([&] { fastweights::update<T>(*problem, *tensors, threads); });                    \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
