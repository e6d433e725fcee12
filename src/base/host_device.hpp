// Marks functions that nvcc compiles for CUDA devices as well as for the host. Other compilers see plain functions.
#pragma once

#if defined(__CUDACC__)
#define TSR_HD __host__ __device__
#else
#define TSR_HD
#endif
