// What the host library needs of the CPU, in the words of Linux's /proc/cpuinfo. Compiled with the flags of the
// kernels, it names what those flags allow them to use. The text is read from the file before the library is loaded
// (sdpa_cutlass/library/cpu_features.py), so nothing of it runs on a CPU that it was not made for.
__attribute__((used)) static const char kNeededOfTheCpu[] =
    "sdpa_cutlass needs of the CPU:"
#ifdef __SSE3__
    " pni"
#endif
#ifdef __SSSE3__
    " ssse3"
#endif
#ifdef __SSE4_1__
    " sse4_1"
#endif
#ifdef __SSE4_2__
    " sse4_2"
#endif
#ifdef __POPCNT__
    " popcnt"
#endif
#ifdef __AVX__
    " avx"
#endif
#ifdef __AVX2__
    " avx2"
#endif
#ifdef __FMA__
    " fma"
#endif
#ifdef __F16C__
    " f16c"
#endif
#ifdef __LZCNT__
    " abm"
#endif
#ifdef __BMI__
    " bmi1"
#endif
#ifdef __BMI2__
    " bmi2"
#endif
#ifdef __MOVBE__
    " movbe"
#endif
#ifdef __AVX512F__
    " avx512f"
#endif
#ifdef __AVX512BW__
    " avx512bw"
#endif
#ifdef __AVX512CD__
    " avx512cd"
#endif
#ifdef __AVX512DQ__
    " avx512dq"
#endif
#ifdef __AVX512VL__
    " avx512vl"
#endif
#ifdef __AVX512VNNI__
    " avx512_vnni"
#endif
#ifdef __AVX512BF16__
    " avx512_bf16"
#endif
#ifdef __AVX512FP16__
    " avx512_fp16"
#endif
    ;
