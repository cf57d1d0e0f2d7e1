// Entry points of the associative recurrence, called through ctypes: src/fastweights/ops/associative/cpu.py checks every
// argument before a pointer comes here.
#include <algorithm>
#include <new>
#include <system_error>
#include <vector>

#include "associative_backward.hpp"
#include "dispatch.hpp"
#include "pool.hpp"

namespace fastweights {
namespace {

template <class T, int Bytes>
FASTWEIGHTS_INLINE void forward_item(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t index,
                                     T* outputs) {
    Chunk<T, Bytes>(p, in, s, index, 0).forward(outputs);
}

template <class T, int Bytes>
FASTWEIGHTS_INLINE void backward_item(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t index,
                                      const T* outputs, const T* grad_outputs, const Gradients<T>& out, T* partial) {
    BackwardChunk<T, Bytes>(p, in, s, index).backward(outputs, grad_outputs, out, partial);
}

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                   \
    TARGET void forward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t i, T* out) {    \
        forward_item<T, BYTES>(p, in, s, i, out);                                                                     \
    }                                                                                                                 \
    TARGET void backward_##NAME(const Problem& p, const Inputs<T>& in, const Shared<T>& s, std::int64_t i,             \
                                const T* outputs, const T* grad_outputs, const Gradients<T>& out, T* partial) {       \
        backward_item<T, BYTES>(p, in, s, i, outputs, grad_outputs, out, partial);                                    \
    }
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)

template <class T>
Shared<T> share(const Problem& p, const Inputs<T>& in, bool backward) {
    Shared<T> shared;
    const int tile = Level::current().bytes == 64 ? Lanes<T, 64>::tile : Lanes<T, 16>::tile;
    const auto pack = [&](bool transposed) {
        std::vector<T> packed;
        for (std::int64_t panel = 0; panel < p.size; panel += tile)
            for (std::int64_t j = 0; j < p.size; ++j)
                for (std::int64_t i = panel; i < panel + tile; ++i)
                    packed.push_back(i >= p.size ? T(0) : in.weight[transposed ? j * p.size + i : i * p.size + j]);
        return packed;
    };
    shared.weight = pack(false);
    if (backward) shared.weight_transposed = pack(true);
    double power = 1;
    for (std::int64_t k = 0; k < p.steps; ++k) {
        shared.power.push_back(T(p.rate * power));
        power *= p.decay;
        shared.kept.push_back(T(power));
    }
    return shared;
}

template <class T>
std::int64_t chunks(const Problem& p) {
    const std::int64_t lanes = 2 * Level::current().bytes / sizeof(T);
    return (p.batch + lanes - 1) / lanes;
}

template <class T>
void forward(const Problem& p, const Inputs<T>& in, T* outputs, int threads) {
    const Shared<T> shared = share(p, in, false);
    parallel_for(chunks<T>(p), threads, [&](int index) {
        FASTWEIGHTS_DISPATCH(forward, p, in, shared, index, outputs);
    });
}

template <class T>
void backward(const Problem& p, const Inputs<T>& in, const T* outputs, const T* grad_outputs, const Gradients<T>& out,
              int threads) {
    const Shared<T> shared = share(p, in, true);
    const std::int64_t count = chunks<T>(p), groups = std::clamp<std::int64_t>(count, 1, 64);
    const std::int64_t width = p.size * (p.size + 2);
    // One sum a group of chunks, the groups fixed by the batch size alone and added in order: the same bits on any
    // number of threads.
    std::vector<T> partial(groups * width, T(0));
    parallel_for(groups, threads, [&](int group) {
        for (std::int64_t index = group * count / groups; index < (group + 1) * count / groups; ++index)
            FASTWEIGHTS_DISPATCH(backward, p, in, shared, index, outputs, grad_outputs, out,
                                 partial.data() + group * width);
    });
    for (std::int64_t group = 1; group < groups; ++group)
        for (std::int64_t i = 0; i < width; ++i) partial[i] += partial[group * width + i];
    const T* const total = partial.data();
    std::copy(total, total + p.size * p.size, out.weight);
    if (in.gain == nullptr) return;
    std::copy(total + p.size * p.size, total + p.size * (p.size + 1), out.gain);
    std::copy(total + p.size * (p.size + 1), total + width, out.shift);
}

template <class Call>
int guarded(Call call) {
    try {
        call();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::system_error&) {  // of std::thread
        return 2;
    } catch (...) {
        return 3;
    }
}

}  // namespace
}  // namespace fastweights

#define FASTWEIGHTS_ENTRY(T, SUFFIX)                                                                                  \
    FASTWEIGHTS_EXPORT int fastweights_associative_forward_##SUFFIX(                                                          \
        const fastweights::Problem* problem, const fastweights::Inputs<T>* inputs, T* outputs, int threads) {         \
        return fastweights::guarded([&] { fastweights::forward<T>(*problem, *inputs, outputs, threads); });           \
    }                                                                                                                 \
    FASTWEIGHTS_EXPORT int fastweights_associative_backward_##SUFFIX(                                                         \
        const fastweights::Problem* problem, const fastweights::Inputs<T>* inputs, const T* outputs,                  \
        const T* grad_outputs, const fastweights::Gradients<T>* gradients, int threads) {                             \
        return fastweights::guarded([&] {                                                                             \
            fastweights::backward<T>(*problem, *inputs, outputs, grad_outputs, *gradients, threads);                  \
        });                                                                                                           \
    }
FASTWEIGHTS_ENTRY(float, float32)
FASTWEIGHTS_ENTRY(double, float64)
