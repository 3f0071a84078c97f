/*
kernels.cu on a CPU, for tests/test_kernels.py: as a library for ctypes, and as a program, which sanitizers need.

    g++ -std=c++20 -O1 -DBLOCK=64 -shared -fPIC kernel_on_cpu.cpp -o kernels.so
    g++ -std=c++20 -O1 -DBLOCK=64 -fsanitize=thread -DPROGRAM kernel_on_cpu.cpp -o program && ./program CASE OUT
*/
#include "cuda_on_cpu.h"
#ifndef KERNELS
#define KERNELS "../kernels.cu"  // the tests also point it at copies with a fault planted
#endif
#include KERNELS

#include <cstdio>
#include <cstdlib>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// C: chunks per row, 0 for what the launcher would choose on a chip of `multiprocessors`.
extern "C" void verify_on_cpu(int version, int is_bf16, const Batch* batch, int C, int multiprocessors, int at_once) {
    const Batch& b = *batch;
    cpu::at_once = at_once;
    if (C == 0) C = chunks_per_row(b.R, b.V, multiprocessors);
    Work w;
    const size_t bytes = lay_out(w, nullptr, b, C);
    char* scratch = new char[bytes];  // exactly as much as is asked for, and garbage in it
    memset(scratch, 0xA5, bytes);
    verify(version, is_bf16, b, C, scratch, multiprocessors, 0);
    delete[] scratch;
}

#ifdef PROGRAM
// CASE: 11 ints (version, is_bf16, C, multiprocessors, at_once, R, G, V, K, N, has_draft_ids), then the arrays in Batch's order,
// then per request how many of its rows may be read. OUT: the three outputs.
template <typename X>
X* read(FILE* file, size_t n) {
    X* x = new X[n];  // an allocation of its own: one element too far is outside
    if (fread(x, sizeof(X), n, file) != n) abort();
    return x;
}

int main(int, char** argv) {
    FILE* file = fopen(argv[1], "rb");
    const int* h = read<int>(file, 11);
    Batch b{h[5], h[6], h[7], h[8], h[9]};
    const size_t R = b.R, G = b.G, K = b.K, row = (size_t)b.V * (h[1] ? 2 : 4);
    b.logits = read<char>(file, b.N * row);
    b.temperature = read<float>(file, R);
    b.p_draft = read<float>(file, R * G * K);
    b.draft_ids = h[10] ? read<int64_t>(file, K) : nullptr;
    b.tokens = read<int64_t>(file, R * G);
    b.verify_len = read<int64_t>(file, R);
    b.u = read<double>(file, R * (G + 1));
    b.n_accepted = new int64_t[R], b.next_token = new int64_t[R], b.error = new int[R];
#ifdef __SANITIZE_ADDRESS__
    // Rows after the first rejection: whoever reads them is reported.
    const int* rows = read<int>(file, R);
    char* at = (char*)b.logits;
    for (size_t r = 0; r < R; at += row * (1 + b.verify_len[r]), r++)
        __asan_poison_memory_region(at + row * rows[r], row * (1 + b.verify_len[r] - rows[r]));
#endif
    verify_on_cpu(h[0], h[1], &b, h[2], h[3], h[4]);
    FILE* out = fopen(argv[2], "wb");
    fwrite(b.n_accepted, 8, R, out), fwrite(b.next_token, 8, R, out), fwrite(b.error, 4, R, out);
    fclose(out);
}
#endif
