// Work that another library queues on a stream of the shared runtime, as NCCL does on CUDA's: for
// the stub of NCCL, which finds it in the program that opens it (tests/nccl).
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_SHARING_FOREIGN_WORK_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_SHARING_FOREIGN_WORK_H_

// `poll` is called when the stream has come so far, by whoever waits for it or asks, until it says
// something else than cudaErrorNotReady; then, or when it is dropped for an error before it,
// `release`.
extern "C" void certkv_sharing_queue(void* stream, int (*poll)(void*), void (*release)(void*),
                                     void* argument);

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_SHARING_FOREIGN_WORK_H_
