#include "launch/environment.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/proc.hpp"

namespace tsr {

namespace {

constexpr int max_world_size = 4096;
// How many ports rank 0 tries. The base is derived from the launcher's settings, never random: ranks on other hosts
// must compute the same list.
constexpr int candidate_ports = 16;

int required_number(const char* name, int64_t least, int64_t most, Launcher launcher) {
    const auto number = env_number(name, least, most);
    if (!number) {
        throw Error(Code::invalid_argument, fmt::format("this process appears to be started by {}, but {} is not set",
                                                        name_of(launcher), name));
    }
    return static_cast<int>(*number);
}

// Reads a variable whose range depends on the variable `other`, with the value `size`.
template <class Read>
auto within(const char* other, int size, Read&& read) {
    try {
        return read();
    } catch (const Error& error) {
        throw error.with_advice(fmt::format("{} is {}", other, size));
    }
}

// Reads rank and sizes from a launcher's four variables; the local two may be missing.
JobEnvironment ranks_from(Launcher launcher, const char* rank, const char* size, const char* local_rank,
                          const char* local_size) {
    JobEnvironment job;
    job.launcher = launcher;
    job.world_size = required_number(size, 1, max_world_size, launcher);
    job.rank = within(size, job.world_size, [&] { return required_number(rank, 0, job.world_size - 1, launcher); });
    const auto local_number = [&](const char* name, int least, int most, const char* other, int of) {
        return static_cast<int>(within(other, of, [&] { return env_number(name, least, most); }).value_or(0));
    };
    job.local_world_size = local_number(local_size, 1, job.world_size, size, job.world_size);
    const bool is_known = job.local_world_size > 0;
    const int locals = is_known ? job.local_world_size : job.world_size;
    job.local_rank = local_number(local_rank, 0, locals - 1, is_known ? local_size : size, locals);
    return job;
}

bool on_one_host(const JobEnvironment& job) { return job.local_world_size == job.world_size; }

// Candidate ports for rank 0's store. TESSERA_STORE_PORT fixes one; otherwise those after MASTER_PORT, which torchrun's
// own store occupies, or after a number derived from the launcher's job id.
std::vector<Address> candidates_at(const std::string& host, int64_t base_port) {
    if (const auto fixed = env_number("TESSERA_STORE_PORT", 1, 65535)) {
        return {{host, static_cast<uint16_t>(*fixed)}};
    }
    std::vector<Address> candidates;
    for (int i = 1; i <= candidate_ports; ++i) {
        int64_t port = base_port + i;
        if (port > 65535) port -= 65535 - 1024;
        candidates.push_back({host, static_cast<uint16_t>(port)});
    }
    return candidates;
}

std::string master_address(const JobEnvironment& job) {
    if (on_one_host(job)) return "127.0.0.1";
    if (const auto address = env_text("MASTER_ADDR")) return *address;
    if (job.launcher == Launcher::slurm) {
        const auto nodes = env_text("SLURM_STEP_NODELIST");
        const std::string host = nodes ? first_host(*nodes) : "";
        if (!host.empty()) return host;
    }
    throw Error(Code::invalid_argument,
                fmt::format("rank {} of {} under {} does not know where the ranks meet; set MASTER_ADDR to the host of "
                            "rank 0{} on all ranks, or TESSERA_STORE to the address of a store",
                            job.rank, job.world_size, name_of(job.launcher),
                            env_text("MASTER_PORT") ? "" : ", and MASTER_PORT to a free port there,"));
}

JobEnvironment from_tessera() {
    JobEnvironment job = ranks_from(Launcher::tessera, "TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK",
                                    "TESSERA_LOCAL_WORLD_SIZE");
    if (const auto number = env_number("TESSERA_REPLACEMENT", 0, INT32_MAX))
        job.replacement = static_cast<int>(*number);
    job.store_uri = env_text("TESSERA_STORE").value_or("");
    if (job.store_uri.empty() && job.world_size > 1) {
        throw Error(Code::invalid_argument, "TESSERA_RANK is set, but TESSERA_STORE is not; `tessera run` sets both");
    }
    return job;
}

JobEnvironment from_torchrun() {
    JobEnvironment job = ranks_from(Launcher::torchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    if (job.world_size == 1) return job;
    const auto port = env_number("MASTER_PORT", 1, 65535);
    // Not MASTER_ADDR: one rank may say localhost and another 127.0.0.1.
    job.job_id = fmt::format("torchrun {} {}", env_text("TORCHELASTIC_RUN_ID").value_or(""), port.value_or(0));
    job.epoch = static_cast<uint64_t>(env_number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX).value_or(0));
    if (env_text("TESSERA_STORE")) return job;
    const std::string host = master_address(job);
    if (!port && !env_text("TESSERA_STORE_PORT")) {
        throw Error(
            Code::invalid_argument,
            "RANK and WORLD_SIZE are set, but neither MASTER_PORT nor TESSERA_STORE_PORT is; set one so that the ranks "
            "can meet");
    }
    job.candidates = candidates_at(host, port.value_or(0));
    return job;
}

JobEnvironment from_mpi(JobEnvironment job, const std::string& id) {
    if (job.world_size == 1) return job;
    job.job_id = fmt::format("{} {}", name_of(job.launcher), id);
    if (env_text("TESSERA_STORE")) return job;
    job.candidates =
        candidates_at(master_address(job), env_number("MASTER_PORT", 1, 65535).value_or(port_from(job.job_id)));
    return job;
}

std::string first_of(std::initializer_list<const char*> names) {
    for (const char* name : names) {
        if (const auto value = env_text(name)) return *value;
    }
    return "";
}

JobEnvironment from_slurm() {
    JobEnvironment job = ranks_from(Launcher::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "");
    if (env_number("SLURM_STEP_NUM_NODES", 1, max_world_size).value_or(0) == 1) job.local_world_size = job.world_size;
    return from_mpi(job, fmt::format("{}.{}", first_of({"SLURM_JOB_ID", "SLURM_JOBID"}), *env_text("SLURM_STEP_ID")));
}

// If every rank believed that it is the only one, they would overwrite each other's checkpoints.
void refuse_half_an_environment() {
    const auto refuse = [](const char* there, const std::string& value, const char* missing) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} is set ({}), but {} is not; set both on every rank, or unset {} "
                                "for a single process",
                                there, value, missing, there));
    };
    const auto rank = env_text("RANK");
    const auto size = env_text("WORLD_SIZE");
    if (rank && !size) refuse("RANK", *rank, "WORLD_SIZE");
    if (size && !rank && *size != "1") refuse("WORLD_SIZE", *size, "RANK");
}

JobEnvironment from_open_mpi() {
    return from_mpi(ranks_from(Launcher::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
                    first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"}));
}

// Hydra gives a job no name, so what started its ranks on this host stands for it: the first ancestor that is no rank. Empty
// if this process cannot see it, as from a pid namespace of its own.
std::string starter_of_pmi_ranks() {
    using namespace std::string_literals;
    for (int64_t pid = ::getppid(); pid > 0;) {
        std::ifstream file(fmt::format("/proc/{}/environ", pid));
        const std::string variables = "\0"s + std::string(std::istreambuf_iterator<char>(file), {});
        const auto process = process_stat(pid);
        if (!process) return "";
        if (variables.find("\0PMI_RANK="s) == std::string::npos) return fmt::format("{} {}", pid, process->start_time);
        pid = process->parent;
    }
    return "";
}

JobEnvironment from_pmi() {
    const JobEnvironment job = ranks_from(Launcher::pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    const std::string id = first_of({"PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"});
    return from_mpi(job, on_one_host(job) ? fmt::format("{} {}", id, starter_of_pmi_ranks()) : id);
}

// Kubernetes tells a pod its index; how many there are, and where the first one is, the manifest has to say.
JobEnvironment from_kubernetes() {
    const auto world_size = env_number("WORLD_SIZE", 1, max_world_size);
    if (!world_size) {
        throw Error(Code::invalid_argument,
                    fmt::format("JOB_COMPLETION_INDEX is set ({}), but WORLD_SIZE is not; set WORLD_SIZE in the pod's "
                                "template to the Job's completions, or to 1 if each pod is a separate job",
                                *env_text("JOB_COMPLETION_INDEX")));
    }
    if (*world_size == 1) return {};
    return from_mpi(ranks_from(Launcher::kubernetes, "JOB_COMPLETION_INDEX", "WORLD_SIZE", "", ""),
                    first_of({"MASTER_ADDR"}));
}

// A launcher's variables. It has started this process if all that `decide` are set.
struct Source {
    Launcher launcher;
    std::vector<const char*> decide;
    std::vector<const char*> others;
    JobEnvironment (*read)();

    [[nodiscard]] bool is_here() const {
        return std::ranges::all_of(decide, [](const char* name) { return env_text(name).has_value(); });
    }
};

// In order: an inner launcher's variables before those of what may have started that launcher.
const std::vector<Source>& sources() {
    static const std::vector<Source> all{
        {Launcher::tessera,
         {"TESSERA_RANK"},
         {"TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_WORLD_SIZE", "TESSERA_STORE",
          "TESSERA_REPLACEMENT"},
         from_tessera},
        {Launcher::torchrun,
         {"RANK", "WORLD_SIZE"},
         {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
          "TORCHELASTIC_RESTART_COUNT"},
         from_torchrun},
        {Launcher::open_mpi,
         {"OMPI_COMM_WORLD_RANK"},
         {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MASTER_ADDR",
          "MASTER_PORT"},
         from_open_mpi},
        {Launcher::pmi,
         {"PMI_RANK", "PMI_SIZE"},
         {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT"},
         from_pmi},
        // SLURM_PROCID is also set in a batch script outside a step, which is not a rank.
        {Launcher::slurm,
         {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"},
         {"SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "MASTER_ADDR", "MASTER_PORT"},
         from_slurm},
        {Launcher::kubernetes, {"JOB_COMPLETION_INDEX"}, {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}, from_kubernetes},
    };
    return all;
}

JobEnvironment found() {
    for (const Source& source : sources()) {
        if (source.is_here()) return source.read();
    }
    refuse_half_an_environment();
    return {};
}

}  // namespace

std::string_view name_of(Launcher launcher) {
    switch (launcher) {
        case Launcher::none: return "no launcher";
        case Launcher::tessera: return "tessera run";
        case Launcher::torchrun: return "torchrun";
        case Launcher::open_mpi: return "mpirun (Open MPI)";
        case Launcher::pmi: return "mpirun (PMI)";
        case Launcher::slurm: return "srun";
        case Launcher::kubernetes: return "Kubernetes";
    }
    return "";
}

JobEnvironment JobEnvironment::detect() {
    log::check_environment();
    JobEnvironment job = found();
    if (job.launcher != Launcher::none) {
        // Explicit settings override derived ones.
        if (const auto uri = env_text("TESSERA_STORE")) job.store_uri = *uri;
        if (const auto id = env_text("TESSERA_JOB_ID")) job.job_id = *id;
        if (const auto epoch = env_number("TESSERA_EPOCH", 0, INT64_MAX)) job.epoch = static_cast<uint64_t>(*epoch);
    }
    return job;
}

uint16_t port_from(std::string_view id) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return static_cast<uint16_t>(20000 + hash % 12000);
}

std::vector<LauncherFound> launchers_found() {
    std::vector<LauncherFound> all;
    for (const Source& source : sources()) {
        if (!source.is_here()) continue;
        LauncherFound& one = all.emplace_back();
        one.launcher = source.launcher;
        for (const auto* names : {&source.decide, &source.others}) {
            for (const char* name : *names) {
                if (auto value = env_text(name)) one.variables.emplace_back(name, std::move(*value));
            }
        }
    }
    return all;
}

std::string first_host(std::string_view node_list) {
    const size_t end = node_list.find_first_of(",[");
    std::string host(node_list.substr(0, end));
    if (end == std::string_view::npos || node_list[end] == ',') return host;
    const std::string_view range = node_list.substr(end + 1);
    host += range.substr(0, range.find_first_of("-,]"));
    return host;
}

}  // namespace tsr
