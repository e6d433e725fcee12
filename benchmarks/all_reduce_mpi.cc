// all_reduce of float sums by MPI, for comparison. Started by mpirun.
// usage: all_reduce_mpi SIZE,SIZE,...
#include <mpi.h>

#include <vector>

#include "measure.hpp"

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int ranks = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const auto sizes = bench::parse_sizes(argc > 1 ? argv[1] : "8");
    std::vector<float> values(*std::max_element(sizes.begin(), sizes.end()) / sizeof(float));
    const auto all_reduce = [&](size_t count) {
        MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    };
    int result = 0;
    for (const size_t bytes : sizes) {
        const size_t count = bytes / sizeof(float);
        bench::fill(values.data(), count, rank);
        all_reduce(count);
        const bool correct = bench::is_sum(values.data(), count, ranks);
        std::fill(values.begin(), values.end(), 0.0F);
        const bench::Timing taken =
            bench::timing(bytes, ranks, [&] { all_reduce(count); }, [] { MPI_Barrier(MPI_COMM_WORLD); });
        if (!correct) result = 1;
        if (rank == 0) bench::report("mpi", "foreign", ranks, bytes, taken, correct);
    }
    MPI_Finalize();
    return result;
}
