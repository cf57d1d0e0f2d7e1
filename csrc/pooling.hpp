// A leaky ReLU of the maximum of every 2 x 2 pixels, channels side by side:
// src/fastweights/ops/conv_block/__init__.py has its definition.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.hpp"

namespace fastweights {

struct PoolingProblem {
    std::int64_t images, height, width, channels;
    double slope;
    std::int64_t threads;
};

struct BFloat16 {
    std::uint16_t bits;
};

// What a number is computed in, and back, to the nearest with ties to even.
FASTWEIGHTS_INLINE float widened(float value) { return value; }
FASTWEIGHTS_INLINE double widened(double value) { return value; }
FASTWEIGHTS_INLINE float widened(BFloat16 value) {
    const std::uint32_t bits = std::uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
}
FASTWEIGHTS_INLINE void store(float value, float& to) { to = value; }
FASTWEIGHTS_INLINE void store(double value, double& to) { to = value; }
FASTWEIGHTS_INLINE void store(float value, BFloat16& to) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to.bits = value != value ? std::uint16_t(0x7fc0) : std::uint16_t(rounded);
}

// One image: its rows of pairs, in each the pixels that stand for four, in each the channels, which fill registers. A code
// says which of the four was the greatest, and whether it was positive: all that the derivatives need.
//
// Sizes are held by value: to the compiler a code that is written could be part of anything that is pointed to.
template <class T>
struct Pooling {
    using Wide = decltype(widened(T()));
    static constexpr std::uint8_t place = 3, positive = 4;
    const std::int64_t height, width, channels;
    const Wide slope;

    FASTWEIGHTS_INLINE explicit Pooling(const PoolingProblem& p)
        : height(p.height), width(p.width), channels(p.channels), slope(p.slope) {}

    // The first of equal ones, and the last that is no number if any is: as torch has it.
    FASTWEIGHTS_INLINE void forward(const T* images, T* pooled, std::uint8_t* codes, std::int64_t image) const {
        each(image, [=](std::int64_t from, std::int64_t to, bool right, bool below) FASTWEIGHTS_INLINE_LAMBDA {
            // Off the edge stands the pixel at it once more, which is left out of the codes.
            const T* const first = images + from;
            const T* const second = right ? first + channels : first;
            const T* const third = below ? first + width * channels : first;
            const T* const fourth = !below ? second : right ? third + channels : third;
            const std::uint8_t there = (right ? 1 : 0) | (below ? 2 : 0);
            maxima(first, second, third, fourth, there, pooled + to, codes + to, channels, slope);
        });
    }

    // The gradient of the images.
    FASTWEIGHTS_INLINE void spread(const T* gradients, const std::uint8_t* codes, T* images, std::int64_t image) const {
        each(image, [=](std::int64_t to, std::int64_t from, bool right, bool below) FASTWEIGHTS_INLINE_LAMBDA {
            for (int p = 0; p <= place; ++p) {
                if ((p & 1 && !right) || (p & 2 && !below)) continue;
                one_of_four(p, gradients + from, codes + from, images + to + offset(p), channels, slope);
            }
        });
    }

    // Of one pixel's channels. `there`: the bits that a code can have, where the edge leaves fewer than four pixels.
    template <class From>
    static FASTWEIGHTS_INLINE void maxima(const From* first, const From* second, const From* third, const From* fourth,
                                          std::uint8_t there, T* __restrict pooled, std::uint8_t* __restrict codes,
                                          const std::int64_t channels, const Wide slope) {
        for (std::int64_t c = 0; c < channels; ++c) {
            Wide most = widened(first[c]);
            std::uint8_t code = 0;
            const auto compare = [&](Wide value, std::uint8_t p) FASTWEIGHTS_INLINE_LAMBDA {
                const bool greater = value > most || value != value;
                most = greater ? value : most;
                code = greater ? p : code;
            };
            compare(widened(second[c]), 1);
            compare(widened(third[c]), 2);
            compare(widened(fourth[c]), 3);
            store(most > 0 ? most : most * slope, pooled[c]);
            codes[c] = (code & there) | (most > 0 ? positive : 0);
        }
    }

    template <class To>
    static FASTWEIGHTS_INLINE void one_of_four(int p, const T* __restrict gradient, const std::uint8_t* __restrict codes,
                                               To* __restrict pixel, const std::int64_t channels, const Wide slope) {
        for (std::int64_t c = 0; c < channels; ++c) {
            const Wide whole = widened(gradient[c]);
            const Wide value = codes[c] & positive ? whole : whole * slope;
            store((codes[c] & place) == p ? value : Wide(0), pixel[c]);
        }
    }

  private:
    FASTWEIGHTS_INLINE std::int64_t offset(int p) const {
        return (p & 1 ? channels : 0) + (p & 2 ? width * channels : 0);
    }

    // body(the first of four pixels, the one that stands for them, is there one to the right, is there one below).
    template <class Body>
    FASTWEIGHTS_INLINE void each(std::int64_t image, Body body) const {
        const std::int64_t rows = (height + 1) / 2, columns = (width + 1) / 2;
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < columns; ++j)
                body(((image * height + 2 * i) * width + 2 * j) * channels, ((image * rows + i) * columns + j) * channels,
                     2 * j + 1 < width, 2 * i + 1 < height);
    }
};

}  // namespace fastweights
