// Entry points of the associative recurrence, called through ctypes: src/fastweights/ops/associative/cpu.py checks every
// argument before a pointer comes here.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "associative_chunk.hpp"
#include "associative_matrix.hpp"
#include "dispatch.hpp"
#include "guarded.hpp"
#include "pack.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

// Numbers that a vector takes in the form's results: whole registers where it lies along them.
template <class T>
std::int64_t pitch(const Problem& p) {
    return p.matrix ? whole_registers<T>(p.size) : p.size;
}

// The matrix form takes columns one after the other; the attention form takes panels of rows, column by column.
template <class T>
Shared<T> share(const Problem& p, const Inputs<T>& in, bool backward) {
    const std::int64_t row = pitch<T>(p), tile = Level::current().bytes == 64 ? Lanes<T, 64>::tile : Lanes<T, 16>::tile;
    const std::int64_t panel = p.matrix ? row : tile, weights = (p.size + panel) * p.size;
    Shared<T> shared{Arena((2 * weights + 2 * row + 2 * p.steps) * sizeof(T))};
    if (p.matrix) shared.episodes = cut(p.steps, p.batch, in.lengths, in.starts);
    if (in.starts)  // those of a team have about as many steps
        std::stable_sort(shared.episodes.begin(), shared.episodes.end(),
                         [](const Episode& x, const Episode& y) { return x.length > y.length; });
    shared.weight = shared.arena.template take<T>(weights);
    pack(in.weight, p.size, p.size, false, panel, shared.weight);
    if (backward) {
        shared.weight_transposed = shared.arena.template take<T>(weights);
        pack(in.weight, p.size, p.size, true, panel, shared.weight_transposed);
    }
    shared.gain = shared.arena.template take_zeroed<T>(row);
    shared.shift = shared.arena.template take_zeroed<T>(row);
    if (in.gain != nullptr) {
        std::copy(in.gain, in.gain + p.size, shared.gain);
        std::copy(in.shift, in.shift + p.size, shared.shift);
    }
    shared.power = shared.arena.template take<T>(p.steps);
    shared.kept = shared.arena.template take<T>(p.steps);
    double power = 1;
    for (std::int64_t k = 0; k < p.steps; ++k) {
        shared.power[k] = T(p.rate * power);
        power *= p.decay;
        shared.kept[k] = T(power);
    }
    return shared;
}

// Python makes the trace, and counts it by itself.
template <class T>
void check_trace(const Problem& p, const Results<T>& results) {
    const std::int64_t bytes = Level::current().bytes, lanes = 2 * bytes / sizeof(T);
    const auto size = [&](auto width) {
        constexpr int wide = decltype(width)::value;
        return p.matrix ? p.steps * p.batch * Sequence<T, wide>::trace_numbers(p)
                        : p.steps * ((p.batch + lanes - 1) / lanes) * Chunk<T, wide>::trace_rows(p) * lanes;
    };
    const std::int64_t expected = bytes == 64   ? size(std::integral_constant<int, 64>{})
                                  : bytes == 32 ? size(std::integral_constant<int, 32>{})
                                                : size(std::integral_constant<int, 16>{});
    if (results.trace && results.trace_size != expected) throw std::length_error("a trace was counted wrong");
}

template <class T>
std::int64_t items(const Problem& p, const Shared<T>& s) {
    const std::int64_t count = p.matrix ? s.episodes.size() : p.batch;
    const std::int64_t lanes = p.matrix ? team_size<T>(p) : 2 * Level::current().bytes / sizeof(T);
    return (count + lanes - 1) / lanes;
}

// One sum of gradients a group of items, the groups fixed by the problem alone and added in order: the same bits on any
// number of threads.
constexpr std::int64_t most_groups = 64;

template <class T>
void forward(const Problem& p, const Inputs<T>& in, const Results<T>& out, int threads) {
    check_trace(p, out);
    const Shared<T> shared = share(p, in, false);
    const std::int64_t count = items<T>(p, shared), groups = std::min(count, most_groups);
    parallel_for(groups, threads, [&](int group) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(forward, p, in, shared, group * count / groups, (group + 1) * count / groups, out);
    });
}

template <class T>
void backward(const Problem& p, const Inputs<T>& in, const Results<T>& from, const T* grad_outputs,
              const Gradients<T>& out, int threads) {
    check_trace(p, from);
    const Shared<T> shared = share(p, in, true);
    clear_unread(shared.episodes, p.size, out.hidden);
    if (in.memory) clear_unread(shared.episodes, p.size * p.size, out.memory);
    const std::int64_t count = items<T>(p, shared), groups = std::clamp<std::int64_t>(count, 1, most_groups);
    const std::int64_t row = pitch<T>(p), width = row * (p.size + 2);
    Arena sums(groups * width * sizeof(T));
    T* const partial = sums.template take_zeroed<T>(groups * width);
    parallel_for(count == 0 ? 0 : groups, threads, [&](int group) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(backward, p, in, shared, group * count / groups, (group + 1) * count / groups, from,
                             grad_outputs, out, partial + group * width);
    });
    for (std::int64_t group = 1; group < groups; ++group)
        for (std::int64_t i = 0; i < width; ++i) partial[i] += partial[group * width + i];
    const T* total = partial;
    for (std::int64_t i = 0; i < p.size; ++i, total += row) std::copy(total, total + p.size, out.weight + i * p.size);
    if (in.gain == nullptr) return;
    std::copy(total, total + p.size, out.gain);
    std::copy(total + row, total + row + p.size, out.shift);
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                   \
    FASTWEIGHTS_EXPORT int fastweights_associative_forward_##SUFFIX(                                                   \
        const fastweights::Problem* problem, const fastweights::Inputs<T>* inputs,                                     \
        const fastweights::Results<T>* results, int threads) {                                                         \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, *results, threads); });           \
    }                                                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_associative_backward_##SUFFIX(                                                  \
        const fastweights::Problem* problem, const fastweights::Inputs<T>* inputs,                                     \
        const fastweights::Results<T>* results, const T* grad_outputs, const fastweights::Gradients<T>* gradients,     \
        int threads) {                                                                                                 \
        return fastweights::guarded(                                                                                   \
            [&] { fastweights::backward<T>(*problem, *inputs, *results, grad_outputs, *gradients, threads); });        \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
