// Marks functions that run on the host and on a GPU.
#ifndef CERTKV_KERNELS_CORE_HOST_DEVICE_H_
#define CERTKV_KERNELS_CORE_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define CERTKV_HOST_DEVICE __host__ __device__
#else
#define CERTKV_HOST_DEVICE
#endif

#endif  // CERTKV_KERNELS_CORE_HOST_DEVICE_H_
