// Entry points of the recurrent delta rule, called through ctypes: src/fastweights/ops/recurrent_delta/cpu.py checks every
// argument before a pointer comes here.
#include "recurrent_delta.hpp"

#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

// A register of AVX-512 would be half empty with heads of eight numbers or fewer, of which each has rows of its own: with those of
// AVX2 they take half the time. `T` and `p` are those of the function around it.
#ifdef FASTWEIGHTS_X86_LEVELS
#define FASTWEIGHTS_DELTA_DISPATCH(NAME, ...)                                                                              \
    do {                                                                                                                   \
        if (Level::current().bytes == 64 && p.size / p.heads * sizeof(T) <= 32) NAME##_v3(__VA_ARGS__);                    \
        else FASTWEIGHTS_DISPATCH(NAME, __VA_ARGS__)                                                                       \
    } while (0)
#else
#define FASTWEIGHTS_DELTA_DISPATCH(NAME, ...) FASTWEIGHTS_DISPATCH(NAME, __VA_ARGS__)
#endif

namespace fastweights {
namespace {

// Sequences are parted into teams, as many as there are threads, or a multiple. Nothing is summed over sequences: the same bits
// on any number of threads.
template <class T, class Body>
void for_teams(const RecurrentDeltaProblem& p, int threads, Body body) {
    const std::int64_t bytes = p.size * (4 * p.size + 2 * p.heads) * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t most = bytes > cached_weight_bytes ? most_in_delta_team : few_in_delta_team;
    // As many rounds of teams as it takes, each as large as the others, so that no thread waits for another.
    const std::int64_t each = (p.batch + threads - 1) / threads, rounds = (each + most - 1) / most;
    const std::int64_t teams = std::min(p.batch, rounds * threads);
    parallel_for(static_cast<int>(teams), threads, [&](int item) {
        const FlushDenormals flush;
        body(p.batch * item / teams, p.batch * (item + 1) / teams);
    });
}

template <class T>
void forward(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in, const RecurrentDeltaResults<T>& out,
             int threads) {
    for_teams<T>(p, threads, [&](std::int64_t from, std::int64_t end) {
        FASTWEIGHTS_DELTA_DISPATCH(recurrent_delta_forward, p, in, from, end, out);
    });
}

template <class T>
void step(const RecurrentDeltaProblem& p, RecurrentDeltaInputs<T> in, RecurrentDeltaStep<T> around,
          const RecurrentDeltaResults<T>& out, int threads) {
    const std::int64_t numbers = p.batch * (4 * p.size + 2 * p.heads);
    Arena arena(numbers * sizeof(T));
    in.drive = around.drive = arena.take<T>(numbers);
    for_teams<T>(p, threads, [&](std::int64_t from, std::int64_t end) {
        FASTWEIGHTS_DELTA_DISPATCH(recurrent_delta_step, p, in, around, from, end, out);
    });
}

template <class T>
void backward(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in, const RecurrentDeltaResults<T>& kept,
              const T* grad_outputs, const T* grad_memory, const RecurrentDeltaGradients<T>& out, int threads) {
    for_teams<T>(p, threads, [&](std::int64_t from, std::int64_t end) {
        FASTWEIGHTS_DELTA_DISPATCH(recurrent_delta_backward, p, in, from, end, kept, grad_outputs, grad_memory, out);
    });
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                     \
    FASTWEIGHTS_EXPORT int fastweights_recurrent_delta_forward_##SUFFIX(                                                 \
        const fastweights::RecurrentDeltaProblem* problem, const fastweights::RecurrentDeltaInputs<T>* inputs,           \
        const fastweights::RecurrentDeltaResults<T>* results, int threads) {                                             \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, *results, threads); });             \
    }                                                                                                                    \
    FASTWEIGHTS_EXPORT int fastweights_recurrent_delta_step_##SUFFIX(                                                    \
        const fastweights::RecurrentDeltaProblem* problem, const fastweights::RecurrentDeltaInputs<T>* inputs,           \
        const fastweights::RecurrentDeltaStep<T>* step, const fastweights::RecurrentDeltaResults<T>* results,            \
        int threads) {                                                                                                   \
        return fastweights::guarded([&] { fastweights::step<T>(*problem, *inputs, *step, *results, threads); });         \
    }                                                                                                                    \
    FASTWEIGHTS_EXPORT int fastweights_recurrent_delta_backward_##SUFFIX(                                                \
        const fastweights::RecurrentDeltaProblem* problem, const fastweights::RecurrentDeltaInputs<T>* inputs,           \
        const fastweights::RecurrentDeltaResults<T>* kept, const T* grad_outputs, const T* grad_memory,                  \
        const fastweights::RecurrentDeltaGradients<T>* gradients, int threads) {                                         \
        return fastweights::guarded([&] {                                                                                \
            fastweights::backward<T>(*problem, *inputs, *kept, grad_outputs, grad_memory, *gradients, threads);          \
        });                                                                                                              \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
