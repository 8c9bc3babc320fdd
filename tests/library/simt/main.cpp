// Runs the cases named on the command line, or all of them. Exit status 0 when every one passed.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "harness.hpp"

namespace sdpa {

// The library's own is in src/c_api.cpp, which needs generated kernels.
Status make_status(sdpa_status code, const char *format, ...) {
  Status status;
  status.code = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message, sizeof(status.message), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace sdpa

static bool run_case(const simt_test::Case &test) {
  try {
    test.body();
  } catch (const std::exception &exception) {
    std::printf("FAILED %s: %s\n", test.name, exception.what());
    return false;
  }
  std::printf("passed %s\n", test.name);
  return true;
}

int main(int argc, char **argv) {
  int num_run = 0;
  int num_failed = 0;
  for (const simt_test::Case &test : simt_test::cases()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    ++num_run;
    if (!run_case(test)) ++num_failed;
  }
  if (num_run == 0 || (argc > 1 && num_run != argc - 1)) {
    std::printf("FAILED: a name on the command line is no case\n");
    return 1;
  }
  return num_failed == 0 ? 0 : 1;
}
