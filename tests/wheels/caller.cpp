// Calls the kernels of a library in place of a process that cannot load it: the emulator or Windows run this program, and
// tests/wheels/elsewhere.py sends it the calls and takes the memory back that they have written.
//
// All numbers are of 64 bits. A request: the entry's name (length, bytes); the regions of memory that its pointers point
// into (address in the other process, length, bytes); its arguments, each a number, an address or a structure (a kind,
// then the number, or length, bytes, and where in it addresses stand). The answer: what the entry returns, and the regions.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <windows.h>
static void* open_library(const char* path) { return reinterpret_cast<void*>(LoadLibraryA(path)); }
static void* find_entry(void* library, const char* name) {
    return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), name));
}
#else
#include <dlfcn.h>
static void* open_library(const char* path) { return dlopen(path, RTLD_NOW); }
static void* find_entry(void* library, const char* name) { return dlsym(library, name); }
#endif

namespace {

using Word = std::int64_t;
using Bytes = std::vector<char>;
constexpr Word line = 64;  // the alignment that pointers keep
constexpr int most_arguments = 8;

void read(void* target, Word size) {
    if (std::fread(target, 1, size, stdin) != static_cast<std::size_t>(size)) std::exit(0);  // the other process is done
}
Word read_word() {
    Word word;
    read(&word, sizeof word);
    return word;
}
Bytes read_bytes() {
    Bytes bytes(read_word());
    read(bytes.data(), bytes.size());
    return bytes;
}
void write(const void* source, Word size) { std::fwrite(source, 1, size, stdout); }

struct Region {
    Word address;
    Bytes memory;
    Word size;
    char* start;  // at the same place of a cache line as in the other process

    static Region receive() {
        Region region;
        region.address = read_word();
        region.size = read_word();
        region.memory.resize(region.size + 2 * line);
        const Word here = reinterpret_cast<Word>(region.memory.data());
        region.start = region.memory.data() + ((region.address - here) % line + line) % line;
        read(region.start, region.size);
        return region;
    }
};

Word translate(Word address, const std::vector<Region>& regions) {
    if (address == 0) return 0;
    for (const Region& region : regions)
        if (address >= region.address && address < region.address + region.size)
            return reinterpret_cast<Word>(region.start + (address - region.address));
    std::fprintf(stderr, "an address is in no region\n");
    std::exit(1);
}

void serve(void* library) {
    const Bytes name = read_bytes();
    std::vector<Region> regions;
    for (Word count = read_word(); count > 0; --count) regions.push_back(Region::receive());
    std::vector<Bytes> structures(most_arguments);
    Word words[most_arguments] = {};
    const Word count = read_word();
    for (Word i = 0; i < count; ++i) {
        switch (read_word()) {
            case 0: words[i] = read_word(); break;
            case 1: words[i] = translate(read_word(), regions); break;
            default:
                structures[i] = read_bytes();
                for (Word places = read_word(); places > 0; --places) {
                    char* const place = structures[i].data() + read_word();
                    Word address;
                    std::memcpy(&address, place, sizeof address);
                    address = translate(address, regions);
                    std::memcpy(place, &address, sizeof address);
                }
                words[i] = reinterpret_cast<Word>(structures[i].data());
        }
    }
    const auto entry = reinterpret_cast<int (*)(Word, Word, Word, Word, Word, Word, Word, Word)>(
        find_entry(library, std::string(name.begin(), name.end()).c_str()));
    if (entry == nullptr) {
        std::fprintf(stderr, "the library has no such entry\n");
        std::exit(1);
    }
    // Arguments that an entry does not have are in registers that it does not read, or on the caller's part of the stack.
    const Word code =
        entry(words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]);
    write(&code, sizeof code);
    for (const Region& region : regions) write(region.start, region.size);
    std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
    void* const library = count > 1 ? open_library(words[1]) : nullptr;
    if (library == nullptr) {
        std::fprintf(stderr, "the library cannot be loaded\n");
        return 1;
    }
#ifdef _WIN32
    _setmode(_fileno(stdin), _O_BINARY);
    _setmode(_fileno(stdout), _O_BINARY);
#endif
    const auto level = reinterpret_cast<const char* (*)()>(find_entry(library, "fastweights_instruction_set"));
    const std::string name = level();
    const Word size = name.size();
    write(&size, sizeof size);
    write(name.data(), size);
    std::fflush(stdout);
    for (;;) serve(library);
}
