// The same loops, compiled for processors with AVX2.
#include "columns/loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace mcr {
namespace {
#include "columns/loops.inc"
}  // namespace

constexpr Loops kAvx2Loops MCR_LOOPS;

}  // namespace mcr
#endif
