// Entry points of the smoothing of Hebbian Softmax, called through ctypes: src/fastweights/ops/hebbian/cpu.py checks
// every argument before a pointer comes here, all but the labels' range.
#include "hebbian.hpp"

#include <stdexcept>

#include "arena.hpp"
#include "dispatch.hpp"
#include "guarded.hpp"

namespace fastweights {
namespace {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES) \
    TARGET void smooth_##NAME(const Smoothing<T>& smoothing) { smoothing.run(); }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)

// One thread: it is bound by memory, and done before others have woken up.
template <class T>
void smooth(const SmoothingProblem& p, const SmoothingTensors<T>& t) {
    Arena arena(p.tokens * sizeof(std::uint64_t) + p.size * sizeof(T));
    std::uint64_t* const sorted = arena.take<std::uint64_t>(p.tokens);
    for (std::int64_t i = 0; i < p.tokens; ++i) {
        // The caller may have written over them since they were checked.
        if (t.labels[i] < 0 || t.labels[i] >= p.classes) throw std::out_of_range("a label is no class");
        sorted[i] = std::uint64_t(t.labels[i]) << place_bits | std::uint64_t(i);
    }
    std::sort(sorted, sorted + p.tokens);
    const Smoothing<T> smoothing{p, t, sorted, arena.take<T>(p.size)};
    FASTWEIGHTS_DISPATCH(smooth, smoothing);
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                     \
    FASTWEIGHTS_EXPORT int fastweights_hebbian_smooth_##SUFFIX(                                          \
        const fastweights::SmoothingProblem* problem, const fastweights::SmoothingTensors<T>* tensors) { \
        return fastweights::guarded([&] { fastweights::smooth<T>(*problem, *tensors); });                \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
