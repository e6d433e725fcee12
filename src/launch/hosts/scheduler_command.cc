#include "launch/hosts/scheduler_command.hpp"

#include <fmt/format.h>

#include "base/refuse.hpp"

namespace tsr {

namespace {

// The number of ranks on every host.
size_t ranks_per_host(const LaunchPlan& plan, const char* launcher) {
    const PlannedHost& first = plan.hosts.front();
    for (const PlannedHost& host : plan.hosts) {
        if (host.ranks.size() != first.ranks.size()) {
            refuse(
                "--launcher {} needs equally many slots on every host, but {} has {} and {} has {}; choose them with "
                "--num_gpus, or use --launcher openmpi",
                launcher, first.host, first.ranks.size(), host.host, host.ranks.size());
        }
    }
    return first.ranks.size();
}

void require_first_slots(const LaunchPlan& plan) {
    for (const PlannedHost& host : plan.hosts) {
        for (size_t i = 0; i < host.ranks.size(); ++i) {
            if (host.ranks[i].slot != static_cast<int>(i)) {
                refuse(
                    "host '{}': mpirun and srun choose the slots themselves, so --include and --exclude can only "
                    "leave out entire hosts; slot {} is left out, slot {} is used",
                    host.host, i, host.ranks[i].slot);
            }
        }
    }
}

std::string host_list(const LaunchPlan& plan) {
    std::string list;
    for (const PlannedHost& host : plan.hosts) list += (list.empty() ? "" : ",") + host.host;
    return list;
}

}  // namespace

Scheduler scheduler_named(const std::string& name) {
    if (name == "openmpi") return Scheduler::open_mpi;
    if (name == "mpich") return Scheduler::mpich;
    if (name == "impi") return Scheduler::intel_mpi;
    if (name == "slurm") return Scheduler::slurm;
    refuse(
        "--launcher {} is not supported: only MVAPICH's own mpirun_rsh understands its hostfile; with MVAPICH 3, use "
        "--launcher mpich",
        name);
}

std::vector<std::string> scheduler_command(Scheduler scheduler, const LaunchPlan& plan, const SchedulerRun& run) {
    require_first_slots(plan);
    const std::string total = std::to_string(plan.world_size());
    std::vector<std::string> words;
    switch (scheduler) {
        case Scheduler::open_mpi: {
            std::string hosts;
            for (const PlannedHost& host : plan.hosts) {
                hosts += fmt::format("{}{}:{}", hosts.empty() ? "" : ",", host.host, host.ranks.size());
            }
            words = {"mpirun", "-n", total, "--host", hosts};
            for (const std::string& name : run.exported) words.insert(words.end(), {"-x", name});
            break;
        }
        case Scheduler::mpich:
        case Scheduler::intel_mpi: {
            const char* name = scheduler == Scheduler::mpich ? "mpich" : "impi";
            words = {"mpirun", "-n",           total, "-ppn", std::to_string(ranks_per_host(plan, name)),
                     "-hosts", host_list(plan)};
            if (!run.exported.empty()) {
                words.insert(words.end(), {"-genvlist", fmt::format("{}", fmt::join(run.exported, ","))});
            }
            break;
        }
        case Scheduler::slurm: {
            const std::string per_host = std::to_string(ranks_per_host(plan, "slurm"));
            words = {"srun",
                     "-n",
                     total,
                     "--nodes",
                     std::to_string(plan.hosts.size()),
                     "--ntasks-per-node",
                     per_host,
                     "--nodelist",
                     host_list(plan),
                     "--export=ALL"};
            if (run.gpus) words.insert(words.end(), {"--gpus-per-node", per_host});
            break;
        }
    }
    words.insert(words.end(), run.arguments.begin(), run.arguments.end());
    words.insert(words.end(), plan.programs.front().begin(), plan.programs.front().end());
    return words;
}

}  // namespace tsr
