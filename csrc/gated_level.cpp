// The gated recurrence at one level.
#include "gated_fast_backward.hpp"
#include "gated_slow.hpp"

namespace fastweights {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    TARGET void slow_forward_##NAME(const SlowProblem& p, const SlowInputs<T>& in, const SlowShared<T>& s,             \
                                    const SlowResults<T>& out, std::int64_t begin, std::int64_t end) {                 \
        for (std::int64_t i = begin; i < end; ++i) SlowChunk<T, BYTES>(p, in, s, i).forward(in, out);                  \
    }                                                                                                                  \
    TARGET void slow_backward_##NAME(const SlowProblem& p, const SlowInputs<T>& in, const SlowShared<T>& s,            \
                                     const SlowResults<T>& from, const SlowResults<T>& grads,                          \
                                     const SlowGradients<T>& out, std::int64_t begin, std::int64_t end) {              \
        for (std::int64_t i = begin; i < end; ++i)                                                                     \
            SlowChunk<T, BYTES>(p, in, s, i).backward(from, grads.inners, grads.states, out);                          \
    }                                                                                                                  \
    TARGET void fast_forward_##NAME(const FastProblem& p, const FastInputs<T>& in, const FastShared<T>& s,             \
                                    const FastResults<T>& out, const Episode* begin, const Episode* end) {             \
        FastSequence<T, BYTES> sequence(p, in, s);                                                                     \
        for (const Episode* e = begin; e < end; ++e) sequence.forward(*e, end[-1], out);                               \
    }                                                                                                                  \
    TARGET void fast_backward_##NAME(const FastProblem& p, const FastInputs<T>& in, const FastShared<T>& s,            \
                                     const FastResults<T>& from, const FastResults<T>& grads,                          \
                                     const FastGradients<T>& out, T* weight_sums, const Episode* begin,                \
                                     const Episode* end) {                                                             \
        BackwardFastSequence<T, BYTES> sequence(p, in, s, weight_sums);                                                \
        for (const Episode* e = begin; e < end; ++e) sequence.backward(*e, from, grads, out);                          \
        sequence.multiply_waiting(out.inners);                                                                         \
    }
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, double)

}  // namespace fastweights
