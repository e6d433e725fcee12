// What the launcher passes to a process through its environment: its rank, the number of ranks, and where they meet.
// Supported, in this order: `tessera run` (TESSERA_RANK), torchrun and launchers that set its variables (RANK), mpirun
// of Open MPI (OMPI_COMM_WORLD_RANK), MPICH and Intel MPI (PMI_RANK), srun (SLURM_PROCID inside a step), pods of a
// Kubernetes Indexed Job (JOB_COMPLETION_INDEX); otherwise a single rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/address.hpp"

namespace tsr {

enum class Launcher { none, tessera, torchrun, open_mpi, pmi, slurm, kubernetes };

[[nodiscard]] std::string_view name_of(Launcher launcher);

struct JobEnvironment {
    Launcher launcher = Launcher::none;
    int rank = 0;
    int world_size = 1;
    int local_rank = 0;
    int local_world_size = 1;  // 0: the launcher does not say; ranks compare their hosts when they join
    std::string job_id;        // the same for all ranks, different for jobs that could meet on one host
    uint64_t epoch = 0;        // restart round
    // In a job that replaces ranks that die: how many processes had this rank before this one.
    std::optional<int> replacement;

    // Where the ranks meet. Not empty: an agent serves this store. Empty: rank 0 serves it on the first free address of
    // `candidates`, and the others look for it there; the handshake distinguishes it from other jobs' stores.
    std::string store_uri;
    std::vector<Address> candidates;

    // Throws INVALID_ARGUMENT naming the variable that is missing or invalid.
    [[nodiscard]] static JobEnvironment detect();

    bool operator==(const JobEnvironment&) const = default;
};

// A launcher whose variables this process has: those that say so, and those that are read with them.
struct LauncherFound {
    Launcher launcher = Launcher::none;
    std::vector<std::pair<std::string, std::string>> variables;
};

// In the order in which detect() looks for them: it takes the first.
[[nodiscard]] std::vector<LauncherFound> launchers_found();

// The first host of a Slurm node list: "node[07-09,12],x" -> "node07".
[[nodiscard]] std::string first_host(std::string_view node_list);

// A port from 20000 to 31999, below the range of ephemeral ports, from a launcher's job id; the same in all versions.
[[nodiscard]] uint16_t port_from(std::string_view id);

}  // namespace tsr
