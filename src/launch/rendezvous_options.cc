#include "launch/rendezvous_options.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "launch/environment.hpp"

namespace tsr {

namespace {

constexpr uint16_t port_of_rendezvous = 29400;  // torchrun's
constexpr uint16_t port_of_master = 29500;

Error wrong(std::string why) { return {Code::invalid_argument, std::move(why)}; }

template <class T>
T number(std::string_view text, std::string_view option, T least, T most) {
    T value{};
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (failure != std::errc{} || end != text.data() + text.size() || !(value >= least) || !(value <= most)) {
        throw wrong(fmt::format("{} '{}': expected a number from {} to {}", option, text, least, most));
    }
    return value;
}

void set_nodes(HostOptions& hosts, std::string_view text) {
    const size_t colon = text.find(':');
    hosts.min_nodes = number(text.substr(0, colon), "--nnodes", 1, max_ranks);
    hosts.max_nodes =
        colon == std::string_view::npos ? hosts.min_nodes : number(text.substr(colon + 1), "--nnodes", 1, max_ranks);
    if (hosts.min_nodes > hosts.max_nodes) {
        throw wrong(fmt::format("--nnodes {}: expected MIN:MAX with MIN <= MAX", text));
    }
}

std::string checked_host(std::string_view host, std::string_view text, std::string_view option) {
    if (host.empty()) throw wrong(fmt::format("{} '{}' has no host", option, text));
    if (host.starts_with('-')) throw wrong(fmt::format("{} '{}': a host cannot begin with '-'", option, text));
    return std::string(host);
}

std::pair<std::string, uint16_t> address_of(std::string_view text, std::string_view option, uint16_t port) {
    std::string_view host = text;
    std::string_view digits;
    if (text.starts_with('[')) {
        const size_t end = text.find(']');
        if (end == std::string_view::npos) throw wrong(fmt::format("{} '{}' has no ]", option, text));
        host = text.substr(1, end - 1);
        digits = text.substr(end + 1);
        if (!digits.empty() && !digits.starts_with(':'))
            throw wrong(fmt::format("{} '{}': expected [ADDRESS]:PORT", option, text));
        if (!digits.empty()) digits.remove_prefix(1);
    } else if (const size_t colon = text.find(':'); colon != std::string_view::npos) {
        if (text.find(':', colon + 1) != std::string_view::npos) {
            throw wrong(fmt::format("{} '{}': write an IPv6 address in brackets, [ADDRESS]:PORT", option, text));
        }
        host = text.substr(0, colon);
        digits = text.substr(colon + 1);
    }
    return {checked_host(host, text, option), digits.empty() ? port : number<uint16_t>(digits, option, 1, 65535)};
}

void set_spares(HostOptions& hosts, std::string_view text) {
    constexpr std::string_view option = "--store-hosts";
    std::set<std::pair<std::string, uint16_t>> known = {{hosts.endpoint_host, hosts.endpoint_port}};
    for (bool more = !text.empty(); more;) {
        const size_t comma = text.find(',');
        more = comma != std::string_view::npos;
        hosts.spares.push_back(address_of(text.substr(0, comma), option, port_of_rendezvous));
        const auto& [host, port] = hosts.spares.back();
        if (!known.insert(hosts.spares.back()).second) {
            throw wrong(
                fmt::format("{} names {} with port {} twice, or the host of --rdzv-endpoint", option, host, port));
        }
        if (more) text.remove_prefix(comma + 1);
    }
    if (hosts.spares.size() == 1) {
        throw wrong(
            fmt::format("{} names one spare, {}: of two store hosts neither can tell the other's death from a cut "
                        "network; name at least two spares",
                        option, hosts.spares.front().first));
    }
    if (hosts.seats() > hosts.max_nodes) {
        throw wrong(fmt::format("{} names {} spares, but of {} hosts (--nnodes) one owns --rdzv-endpoint", option,
                                hosts.spares.size(), hosts.max_nodes));
    }
}

milliseconds span(std::string_view value, const std::string& option) {
    return milliseconds{static_cast<int64_t>(number(value, option, 0.0, 1e6) * 1000)};
}

// torchrun's keys; those that have no meaning here are accepted.
void set_conf(HostOptions& hosts, std::string_view text) {
    double interval = 0;
    double attempts = 3;
    while (!text.empty()) {
        const std::string_view entry = text.substr(0, text.find(','));
        text.remove_prefix(std::min(text.size(), entry.size() + 1));
        const size_t equals = entry.find('=');
        if (equals == std::string_view::npos || equals == 0) {
            throw wrong(fmt::format("--rdzv-conf '{}': expected KEY=VALUE,...", entry));
        }
        const std::string_view key = entry.substr(0, equals);
        const std::string_view value = entry.substr(equals + 1);
        const std::string option = fmt::format("--rdzv-conf {}", key);
        if (key == "join_timeout" || key == "timeout") {
            hosts.join_timeout = span(value, option);
        } else if (key == "last_call_timeout") {
            hosts.last_call = span(value, option);
        } else if (key == "keep_alive_interval") {
            interval = number(value, option, 0.1, 1e6);
        } else if (key == "keep_alive_max_attempt") {
            attempts = number(value, option, 1.0, 1e6);
        } else if (key == "is_host") {
            if (value != "true" && value != "false" && value != "1" && value != "0") {
                throw wrong(fmt::format("{} '{}': expected true or false", option, value));
            }
            hosts.is_host = value == "true" || value == "1";
        } else if (key != "close_timeout" && key != "heartbeat_timeout" && key != "read_timeout" &&
                   key != "store_type" && key != "rank") {
            throw wrong(fmt::format("--rdzv-conf has the unknown key '{}'", key));
        }
    }
    if (interval > 0) hosts.silence = milliseconds{static_cast<int64_t>(std::min(interval * attempts, 1e6) * 1000)};
    if (hosts.silence < milliseconds{2000})
        throw wrong(
            "--rdzv-conf: agents report once per second; keep_alive_interval times keep_alive_max_attempt must be at "
            "least 2 s");
}

// An agent that srun started, one per host.
void set_from_slurm(HostOptions& hosts) {
    const auto nodes = env_text("SLURM_STEP_NODELIST");
    const auto step = env_text("SLURM_STEP_ID");
    const std::string host = nodes && step ? first_host(*nodes) : "";
    if (host.empty()) {
        throw wrong(
            "a job of several hosts needs the place where its agents meet: give all of them the same --rdzv-endpoint "
            "HOST:PORT, an address of one of the hosts");
    }
    auto job = env_text("SLURM_JOB_ID");
    if (!job) job = env_text("SLURM_JOBID");
    const std::string id = fmt::format("{}.{}", job.value_or(""), *step);
    hosts.endpoint_host = host;
    hosts.endpoint_port = port_from(id);
    if (hosts.run_id == "none") hosts.run_id = id;
    if (hosts.node_rank >= 0) return;
    if (const auto rank = env_number("SLURM_NODEID", 0, max_ranks - 1)) hosts.node_rank = static_cast<int>(*rank);
}

}  // namespace

std::optional<HostOptions> hosts_of(const HostWords& words) {
    HostOptions hosts;
    set_nodes(hosts, words.nodes);
    if (!words.backend.empty() && words.backend != "static" && words.backend != "c10d") {
        throw wrong(fmt::format("--rdzv-backend {}: expected static or c10d, which mean the same here", words.backend));
    }
    if (words.node_rank) hosts.node_rank = number(*words.node_rank, "--node-rank", 0, max_ranks - 1);
    if (!words.run_id.empty()) hosts.run_id = words.run_id;
    set_conf(hosts, words.conf);
    if (hosts.max_nodes == 1) return std::nullopt;
    if (words.standalone) throw wrong(fmt::format("--standalone and --nnodes {} contradict each other", words.nodes));
    if (hosts.node_rank >= hosts.max_nodes) {
        throw wrong(fmt::format("--node-rank {} is not below the number of hosts, {} (--nnodes)", hosts.node_rank,
                                hosts.max_nodes));
    }
    if (!words.endpoint.empty()) {
        std::tie(hosts.endpoint_host, hosts.endpoint_port) =
            address_of(words.endpoint, "--rdzv-endpoint", port_of_rendezvous);
    } else if (!words.master_address.empty()) {
        std::string_view host = words.master_address;
        if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
        hosts.endpoint_host = checked_host(host, words.master_address, "--master-addr");
        hosts.endpoint_port =
            words.master_port.empty() ? port_of_master : number<uint16_t>(words.master_port, "--master-port", 1, 65535);
    } else {
        set_from_slurm(hosts);
    }
    set_spares(hosts, words.store_hosts);
    return hosts;
}

}  // namespace tsr
