# The clang of the package ziglang as a cross compiler: `make wheels` builds for every platform with it. The environment
# says where it is (ZIG) and what it compiles for (ZIG_TARGET, such as x86_64-linux-gnu.2.28).
string(REPLACE "-" ";" parts "$ENV{ZIG_TARGET}")
list(GET parts 0 CMAKE_SYSTEM_PROCESSOR)
list(GET parts 1 system)
if(system MATCHES "^macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_INSTALL_NAME_TOOL true)  # CMake asks for it; a library that needs none of ours has nothing to rename
  set(CMAKE_BUILD_WITH_INSTALL_NAME_DIR ON)
  set(CMAKE_INSTALL_NAME_DIR "@rpath")
elseif(system STREQUAL "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER "$ENV{ZIG}")  # CMake asks for it; there are no resources
else()
  set(CMAKE_SYSTEM_NAME Linux)
  # The C++ library is part of ours, and nobody else's business.
  set(exports "-Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
endif()
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s ${exports}")
set(CMAKE_STRIP true)  # this machine's own does not know the other formats
set(CMAKE_CXX_COMPILER "$ENV{ZIG}" c++)
set(CMAKE_CXX_COMPILER_TARGET $ENV{ZIG_TARGET})
