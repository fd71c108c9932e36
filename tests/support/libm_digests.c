/* Digests of the C library's expf, log1pf and sqrt(softplus) over all 2^32 inputs.
 *
 * Prints a line for each block of 2^24 inputs: the block (the inputs' upper byte, hex), then a digest of each function.
 * A digest is the sum of a mix of input and result bits, modulo 2^64; a NaN counts as 0x7fc00000.
 * The scripts beside this file build it without contraction, and check library and machine.
 */
#include <gnu/libc-version.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint64_t mix(uint32_t input, float result) {
  uint32_t bits;
  memcpy(&bits, &result, 4);
  if (isnan(result)) bits = 0x7fc00000;
  uint64_t t = (((uint64_t)input << 32) | bits) * 0x9e3779b97f4a7c15u;
  t = (t ^ (t >> 29)) * 0xbf58476d1ce4e5b9u;
  return t ^ (t >> 32);
}

int main(void) {
  if (!__builtin_cpu_supports("fma") || !__builtin_cpu_supports("avx2")) {
    fprintf(stderr, "this machine has no FMA: its expf is another variant\n");
    return 1;
  }
  fprintf(stderr, "glibc %s\n", gnu_get_libc_version());
  for (uint32_t block = 0; block < 256; block++) {
    uint64_t exps = 0, logs = 0, scores = 0;
    for (uint32_t i = 0; i < 1u << 24; i++) {
      uint32_t input = block << 24 | i;
      float v = from_bits(input), e = expf(v);
      exps += mix(input, e);
      logs += mix(input, log1pf(v));
      scores += mix(input, sqrtf(v > 20 ? v : log1pf(e)));
    }
    printf("%02x %016llx %016llx %016llx\n", block, (unsigned long long)exps,
           (unsigned long long)logs, (unsigned long long)scores);
  }
  return 0;
}
