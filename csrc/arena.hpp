// Scratch memory of a kernel.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#ifdef _WIN32
#include <malloc.h>
#endif

#include "pages.hpp"

namespace fastweights {

// Blocks that a thread has done with and will soon want again: memory fresh from the system costs a page fault for every
// 4 KiB, which can take longer than what is computed in it.
class Spare {
  public:
    struct Block {
        void* start;
        std::size_t size;
    };

    static Spare& mine() {
        static thread_local Spare spare;
        return spare;
    }
    Block take(std::size_t size, std::size_t alignment) {
        for (Block& kept : blocks)
            if (kept.start && kept.size >= size && kept.size <= 4 * size) return std::exchange(kept, Block{nullptr, 0});
        void* const start = allocate(size, alignment);
        if (!start) throw std::bad_alloc();
        prefer_large_pages(start, size);
        return {start, size};
    }
    void keep(Block block) {
        if (block.size <= most_bytes)
            for (Block& kept : blocks)
                if (!kept.start) {
                    kept = block;
                    return;
                }
        if (block.size <= most_bytes) std::swap(block, blocks[oldest++ % most_blocks]);
        release(block.start);
    }
    ~Spare() {
        for (Block& kept : blocks) release(kept.start);
    }

  private:
#ifdef _WIN32
    static void* allocate(std::size_t size, std::size_t alignment) { return _aligned_malloc(size, alignment); }
    static void release(void* start) { _aligned_free(start); }
#else
    static void* allocate(std::size_t size, std::size_t alignment) { return std::aligned_alloc(alignment, size); }
    static void release(void* start) { std::free(start); }
#endif
    static constexpr std::size_t most_blocks = 8, most_bytes = std::size_t(4) << 20;  // 32 MiB a thread at most
    Block blocks[most_blocks] = {};
    std::size_t oldest = 0;
};

struct Arena {  // one block of aligned memory, cut up in order
    // Every piece begins on a cache line: a register that is read across two costs twice.
    static constexpr std::size_t line = 64;
    static constexpr std::size_t most_pieces = 64;  // of which each may leave the rest of a line

    Spare::Block block;
    std::size_t used = 0;

    explicit Arena(std::size_t bytes) : block(Spare::mine().take((bytes / line + 1 + most_pieces) * line, line)) {}
    Arena(Arena&& other) noexcept : block(std::exchange(other.block, {nullptr, 0})), used(other.used) {}
    ~Arena() {
        if (block.start) Spare::mine().keep(block);
    }

    template <class Row>
    Row* take(std::int64_t rows) {
        Row* start = reinterpret_cast<Row*>(static_cast<char*>(block.start) + used);
        used += (rows * sizeof(Row) + line - 1) / line * line;
        if (used > block.size) throw std::length_error("an arena was counted too small");
        return start;
    }
    template <class Row>
    Row* take_zeroed(std::int64_t rows) {
        return static_cast<Row*>(std::memset(take<Row>(rows), 0, rows * sizeof(Row)));
    }
};

}  // namespace fastweights
