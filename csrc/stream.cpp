// Entry points of the softmax that adapts along a stream, called through ctypes: src/fastweights/ops/stream/cpu.py checks
// every argument before a pointer comes here.
#include "stream.hpp"

#include "arena.hpp"
#include "dispatch.hpp"
#include "guarded.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                            \
    TARGET void find_##NAME(const FindProblem& problem, const FindTensors<T>& tensors,                         \
                            const FindScratch<T>& scratch, std::int64_t first, std::int64_t count) {           \
        Search<T>{problem, tensors, scratch, first, count}.run();                                              \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

template <class T, class S>
struct Kinds {
    using Number = T;
    using Stored = S;
};
using Exact = Kinds<float, float>;
using Double = Kinds<double, double>;
using Half = Kinds<float, std::uint16_t>;

#define FASTWEIGHTS_VARIANT(K, NAME, TARGET, BYTES)                                                            \
    TARGET void predict_##NAME(const PredictProblem& problem,                                                  \
                               const PredictTensors<K::Number, K::Stored>& tensors) {                          \
        Prediction<K::Number, K::Stored, BYTES>{problem, tensors}.run();                                       \
    }                                                                                                          \
    TARGET void adapt_##NAME(const AdaptProblem& problem, const AdaptTensors<K::Number, K::Stored>& tensors,   \
                             const AdaptScratch<K::Number>& scratch, std::int64_t first, std::int64_t count) { \
        Adaptation<K::Number, K::Stored, BYTES>{problem, tensors, scratch, first, count}.run();                \
    }                                                                                                          \
    TARGET void subtract_##NAME(const SubtractProblem& problem,                                                \
                                const SubtractTensors<K::Number, K::Stored>& tensors, std::int64_t first,      \
                                std::int64_t count) {                                                          \
        Subtraction<K::Number, K::Stored, BYTES>{problem, tensors, first, count}.run();                        \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, Exact)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, Double)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, Half)

// A query does not depend on the others: any share of them gives the same bits.
template <class Problem, class Task>
void share(const Problem& problem, Task task) {
    const std::int64_t items = std::min(problem.threads, problem.positions);
    parallel_for(int(items), int(items), [&](int item) {
        const std::int64_t first = item * problem.positions / items;
        task(first, (item + 1) * problem.positions / items - first);
    });
}

template <class T>
void find(const FindProblem& p, const FindTensors<T>& t) {
    share(p, [&](std::int64_t first, std::int64_t count) {
        Arena arena(p.rows * (sizeof(T) + 24) + find_buckets * 4 + 8);
        T* const squares = arena.take<T>(p.rows);
        double *const exact = arena.take<double>(p.rows), *const sorted = arena.take<double>(p.rows);
        std::uint32_t* const buckets = arena.take<std::uint32_t>(find_buckets);
        std::int32_t* const near = arena.take<std::int32_t>(p.rows + 1);
        const FindScratch<T> scratch{squares, exact, sorted, buckets, near, arena.take<std::int32_t>(p.rows + 1)};
        FASTWEIGHTS_DISPATCH(find, p, t, scratch, first, count);
    });
}

template <class T, class Stored>
void predict(const PredictProblem& p, const PredictTensors<T, Stored>& t) {
    const FlushDenormals flush;
    FASTWEIGHTS_DISPATCH(predict, p, t);
}

template <class T, class Stored>
void adapt(const AdaptProblem& p, const AdaptTensors<T, Stored>& t) {
    share(p, [&](std::int64_t first, std::int64_t count) {
        const FlushDenormals flush;
        Arena arena(count * (4 + 4 * sizeof(T)));
        std::int32_t* const next = arena.take<std::int32_t>(count);
        T *const most = arena.take<T>(count), *const sums = arena.take<T>(count), *const wholes = arena.take<T>(count);
        const AdaptScratch<T> scratch{next, most, sums, wholes, arena.take<T>(count)};
        FASTWEIGHTS_DISPATCH(adapt, p, t, scratch, first, count);
    });
}

template <class T, class Stored>
void subtract(const SubtractProblem& p, const SubtractTensors<T, Stored>& t) {
    share(p, [&](std::int64_t first, std::int64_t count) {
        const FlushDenormals flush;
        FASTWEIGHTS_DISPATCH(subtract, p, t, first, count);
    });
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_FIND(T, SUFFIX)                                                                           \
    FASTWEIGHTS_EXPORT int fastweights_stream_find_##SUFFIX(const fastweights::FindProblem* problem,          \
                                                            const fastweights::FindTensors<T>* tensors) {     \
        return fastweights::guarded([&] { fastweights::find<T>(*problem, *tensors); });                       \
    }
FASTWEIGHTS_FIND(float, float32)
FASTWEIGHTS_FIND(double, float64)

#define FASTWEIGHTS_ENTRY(T, STORED, SUFFIX)                                                                        \
    FASTWEIGHTS_EXPORT int fastweights_stream_predict_##SUFFIX(                                                     \
        const fastweights::PredictProblem* problem, const fastweights::PredictTensors<T, STORED>* tensors) {        \
        return fastweights::guarded([&] { fastweights::predict(*problem, *tensors); });                             \
    }                                                                                                               \
    FASTWEIGHTS_EXPORT int fastweights_stream_adapt_##SUFFIX(const fastweights::AdaptProblem* problem,              \
                                                             const fastweights::AdaptTensors<T, STORED>* tensors) { \
        return fastweights::guarded([&] { fastweights::adapt(*problem, *tensors); });                               \
    }                                                                                                               \
    FASTWEIGHTS_EXPORT int fastweights_stream_subtract_##SUFFIX(                                                    \
        const fastweights::SubtractProblem* problem, const fastweights::SubtractTensors<T, STORED>* tensors) {      \
        return fastweights::guarded([&] { fastweights::subtract(*problem, *tensors); });                            \
    }
FASTWEIGHTS_ENTRY(float, float, float32)
FASTWEIGHTS_ENTRY(double, double, float64)
FASTWEIGHTS_ENTRY(float, std::uint16_t, uint16)
