// The command line that starts a planned job by mpirun or srun. Variables are exported by name, so no value is an
// argument, which other users of the machine could read.
#pragma once

#include <string>
#include <vector>

#include "launch/hosts/plan.hpp"

namespace tsr {

enum class Scheduler { open_mpi, mpich, intel_mpi, slurm };

// The launcher of DeepSpeed's name "openmpi", "mpich", "impi" or "slurm". Throws INVALID_ARGUMENT for "mvapich".
[[nodiscard]] Scheduler scheduler_named(const std::string& name);

struct SchedulerRun {
    std::vector<std::string> exported;   // names of variables
    std::vector<std::string> arguments;  // further ones for the launcher
    bool gpus = false;                   // srun asks for a GPU for each rank
};

// Throws INVALID_ARGUMENT for a plan that the launcher cannot express: slots of a host that are not its first ones, and
// except for Open MPI different numbers of ranks per host.
[[nodiscard]] std::vector<std::string> scheduler_command(Scheduler scheduler, const LaunchPlan& plan,
                                                         const SchedulerRun& run);

}  // namespace tsr
