// No exception may cross into Python: an entry point gives a number in its place.
#pragma once

#include <new>
#include <stdexcept>
#include <system_error>

namespace fastweights {

template <class Call>
int guarded(Call call) {
    try {
        call();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    } catch (const std::system_error&) {  // of std::thread
        return 2;
    } catch (const std::out_of_range&) {  // an index, of what only the kernel looks at
        return 4;
    } catch (const std::domain_error&) {  // a number, of what only the kernel looks at
        return 5;
    } catch (...) {
        return 3;
    }
}

}  // namespace fastweights
