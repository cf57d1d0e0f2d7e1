// The associative recurrence at one level.
#include <algorithm>

#include "associative_backward.hpp"
#include "associative_matrix_backward.hpp"

namespace fastweights {
namespace {

template <class T, class Visit>
FASTWEIGHTS_INLINE void for_teams(const Shared<T>& s, int size, std::int64_t begin, std::int64_t end, Visit visit) {
    const std::int64_t count = s.episodes.size();
    for (std::int64_t i = begin * size; i < std::min(end * size, count); i += size)
        visit(&s.episodes[i], static_cast<int>(std::min<std::int64_t>(size, count - i)));
}

// An item of work: a chunk of sequences in the attention form, a team of episodes in the matrix form, which alone has the
// final memory to give.
template <class T, int Bytes>
FASTWEIGHTS_INLINE void forward_items(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,
                                      std::int64_t end, const Results<T>& out) {
    if (p.matrix) {
        const int size = team_size<T>(p);
        Team<T, Bytes, Sequence<T, Bytes>> team(p, in, s, size);
        for_teams(s, size, begin, end, [&](const Episode* episodes, int count) FASTWEIGHTS_INLINE_LAMBDA {
            team.forward(episodes, count, out);
        });
    } else {
        for (std::int64_t i = begin; i < end; ++i) Chunk<T, Bytes>(p, in, s, i).forward(out);
    }
}

template <class T, int Bytes>
FASTWEIGHTS_INLINE void backward_items(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,
                                       std::int64_t end, const Results<T>& from, const T* grad_outputs,
                                       const Gradients<T>& out, T* partial) {
    if (p.matrix) {
        const int size = team_size<T>(p);
        BackwardTeam<T, Bytes> team(p, in, s, size);
        for_teams(s, size, begin, end, [&](const Episode* episodes, int count) FASTWEIGHTS_INLINE_LAMBDA {
            team.backward(episodes, count, from, grad_outputs, out, partial);
        });
    } else {
        for (std::int64_t i = begin; i < end; ++i)
            BackwardChunk<T, Bytes>(p, in, s, i).backward(from, grad_outputs, out, partial);
    }
}

}  // namespace

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    TARGET void forward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,          \
                               std::int64_t end, const Results<T>& out) {                                              \
        forward_items<T, BYTES>(p, in, s, begin, end, out);                                                            \
    }                                                                                                                  \
    TARGET void backward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t begin,         \
                                std::int64_t end, const Results<T>& from, const T* grad_outputs,                       \
                                const Gradients<T>& out, T* partial) {                                                 \
        backward_items<T, BYTES>(p, in, s, begin, end, from, grad_outputs, out, partial);                              \
    }
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, double)


}  // namespace fastweights
