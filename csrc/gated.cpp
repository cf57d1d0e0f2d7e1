// Entry points of the gated recurrence, called through ctypes: src/fastweights/ops/gated/cpu.py checks every argument
// before a pointer comes here.
#include <algorithm>

#include "dispatch.hpp"
#include "gated_fast.hpp"
#include "gated_slow.hpp"
#include "guarded.hpp"
#include "pack.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

// The work of so many items in at most so many groups.
template <class Work>
void in_groups(std::int64_t items, int threads, Work work, std::int64_t most = 64) {
    const std::int64_t groups = std::min(items, most);
    parallel_for(groups, threads, [&](int group) {
        const FlushDenormals flush;
        work(group * items / groups, (group + 1) * items / groups, group);
    });
}

template <class T>
SlowShared<T> share(const SlowProblem& p, const SlowInputs<T>& in, bool transposed) {
    const std::int64_t tile = Level::current().bytes == 64 ? Lanes<T, 64>::tile : Lanes<T, 16>::tile;
    const std::int64_t most = std::max((p.inner + tile) * p.size, (p.size + tile) * p.inner);
    SlowShared<T> shared{Arena(2 * most * sizeof(T)), nullptr, nullptr};
    shared.weight_hh = shared.arena.template take<T>(most);
    shared.weight_z = shared.arena.template take<T>(most);
    if (transposed) {
        pack(in.weight_hh, p.size, p.inner, true, tile, shared.weight_hh);
        pack(in.weight_z, p.inner, p.size, true, tile, shared.weight_z);
    } else {
        pack(in.weight_hh, p.inner, p.size, false, tile, shared.weight_hh);
        pack(in.weight_z, p.size, p.inner, false, tile, shared.weight_z);
    }
    return shared;
}

template <class T>
std::int64_t chunks(const SlowProblem& p) {
    const std::int64_t lanes = 2 * Level::current().bytes / sizeof(T);
    return (p.batch + lanes - 1) / lanes;
}

template <class T>
void slow_forward(const SlowProblem& p, const SlowInputs<T>& in, const SlowResults<T>& out, int threads) {
    const SlowShared<T> shared = share(p, in, false);
    in_groups(chunks<T>(p), threads, [&](std::int64_t begin, std::int64_t end, int) {
        FASTWEIGHTS_DISPATCH(slow_forward, p, in, shared, out, begin, end);
    });
}

template <class T>
void slow_backward(const SlowProblem& p, const SlowInputs<T>& in, const SlowResults<T>& from,
                   const SlowResults<T>& grads, const SlowGradients<T>& out, int threads) {
    const SlowShared<T> shared = share(p, in, true);
    in_groups(chunks<T>(p), threads, [&](std::int64_t begin, std::int64_t end, int) {
        FASTWEIGHTS_DISPATCH(slow_backward, p, in, shared, from, grads, out, begin, end);
    });
}

template <class T>
void fast_forward(const FastProblem& p, const FastInputs<T>& in, const FastResults<T>& out, int threads) {
    const std::int64_t rows = p.update_numbers(), wide = whole_registers<T>(rows);
    FastShared<T> shared{Arena(wide * p.inner * sizeof(T)), nullptr};
    shared.weight = shared.arena.template take<T>(wide * p.inner);
    pack(in.weight, rows, p.inner, false, wide, shared.weight);
    const std::vector<Episode> episodes = cut(p.steps, p.batch, in.lengths, in.starts);
    in_groups(episodes.size(), threads, [&](std::int64_t begin, std::int64_t end, int) {
        FASTWEIGHTS_DISPATCH(fast_forward, p, in, shared, out, episodes.data() + begin, episodes.data() + end);
    });
}

template <class T>
void fast_backward(const FastProblem& p, const FastInputs<T>& in, const FastResults<T>& from,
                   const FastResults<T>& grads, const FastGradients<T>& out, int threads) {
    constexpr int most = 16;  // groups, each of which has a sum for the weight
    const std::int64_t rows = p.update_numbers(), wide = whole_registers<T>(p.inner + 1), numbers = rows * wide;
    FastShared<T> shared{Arena(numbers * sizeof(T)), nullptr};
    shared.weight = shared.arena.template take<T>(numbers);
    pack(in.weight, p.inner, rows, true, wide, shared.weight);
    const std::vector<Episode> episodes = cut(p.steps, p.batch, in.lengths, in.starts);
    Arena arena(most * numbers * sizeof(T));
    T* const sums = arena.template take<T>(most * numbers);
    in_groups(episodes.size(), threads, [&](std::int64_t begin, std::int64_t end, int group) {
        FASTWEIGHTS_DISPATCH(fast_backward, p, in, shared, from, grads, out, sums + group * numbers,
                             episodes.data() + begin, episodes.data() + end);
    }, most);
    const int groups = std::min<std::int64_t>(episodes.size(), most);
    for (int group = 1; group < groups; ++group)
        for (std::int64_t i = 0; i < numbers; ++i) sums[i] += sums[group * numbers + i];
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int j = 0; j < p.inner; ++j) out.weight[row * p.inner + j] = groups ? sums[row * wide + j] : T(0);
        out.bias[row] = groups ? sums[row * wide + p.inner] : T(0);
    }
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                   \
    FASTWEIGHTS_EXPORT int fastweights_gated_slow_forward_##SUFFIX(                                                    \
        const fastweights::SlowProblem* problem, const fastweights::SlowInputs<T>* inputs,                             \
        const fastweights::SlowResults<T>* results, int threads) {                                                     \
        return fastweights::guarded([&] { fastweights::slow_forward<T>(*problem, *inputs, *results, threads); });      \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_gated_slow_backward_##SUFFIX(                                                   \
        const fastweights::SlowProblem* problem, const fastweights::SlowInputs<T>* inputs,                             \
        const fastweights::SlowResults<T>* results, const fastweights::SlowResults<T>* grads,                          \
        const fastweights::SlowGradients<T>* gradients, int threads) {                                                 \
        return fastweights::guarded([&] {                                                                              \
            fastweights::slow_backward<T>(*problem, *inputs, *results, *grads, *gradients, threads);                   \
        });                                                                                                            \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_gated_fast_forward_##SUFFIX(                                                    \
        const fastweights::FastProblem* problem, const fastweights::FastInputs<T>* inputs,                             \
        const fastweights::FastResults<T>* results, int threads) {                                                     \
        return fastweights::guarded([&] { fastweights::fast_forward<T>(*problem, *inputs, *results, threads); });      \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_gated_fast_backward_##SUFFIX(                                                   \
        const fastweights::FastProblem* problem, const fastweights::FastInputs<T>* inputs,                             \
        const fastweights::FastResults<T>* results, const fastweights::FastResults<T>* grads,                          \
        const fastweights::FastGradients<T>* gradients, int threads) {                                                 \
        return fastweights::guarded([&] {                                                                              \
            fastweights::fast_backward<T>(*problem, *inputs, *results, *grads, *gradients, threads);                   \
        });                                                                                                            \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
