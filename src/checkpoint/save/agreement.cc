#include "checkpoint/save/agreement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/json.hpp"
#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

Json to_json(const Values& values) {
    Json::Object members;
    for (const auto& [name, value] : values) members.push_back({name, value});
    return Json(std::move(members));
}

// The structure of the tensors and what the ranks must have in common of the values.
std::string common_text(const Digest& tensors, const State& state, const Values& values) {
    std::string text(tensors.begin(), tensors.end());
    for (const auto& [name, value] : values) {
        if (!private_rank(name)) text += state.told(name, value);
    }
    return text;
}

}  // namespace

void agree_on_state(Peers& peers, const std::string& root, const PlanOptions& options, CheckReplicas check,
                    PlanCache& plans, SaveJob& job, const State& state, CopyStreams& copies) {
    Values values;
    auto error = attempt([&] { values = state.collect(); });
    struct Ballot {
        Digest structure;
        Digest aliases;
        int64_t step;
        std::array<char, 36> save_id;
        int32_t has_private_values;
    };
    Ballot record{};
    std::shared_ptr<const StatePlan> planned;
    Values own;
    if (!error) {
        error = attempt([&] {
            if (job.step < 0) {
                throw Error(Code::invalid_argument, fmt::format("step is {}; it must be 0 or more", job.step));
            }
            planned = plans.of(state, peers.rank(), peers.world_size(), options);
            record.structure = digest_of(common_text(planned->structure, state, values));
            record.aliases = planned->alias_digest;
            record.step = job.step;
            for (const auto& [name, value] : values) {
                const auto rank = private_rank(name);
                if (!rank) continue;
                if (*rank != peers.rank()) {
                    throw Error(
                        Code::invalid_argument,
                        fmt::format("value '{}' belongs to rank {}; each rank may set only its own", name, *rank));
                }
                own.emplace(name, value);
            }
            record.has_private_values = own.empty() ? 0 : 1;
            const std::string uuid = random_uuid();
            std::copy_n(uuid.begin(), record.save_id.size(), record.save_id.begin());
        });
    }
    std::vector<Ballot> records;
    if (const auto agreed = peers.vote(error, record, records)) throw Error(agreed->with_operation("save"));

    // Every rank sees the same records, so all take the same turn here.
    bool same = true;
    bool same_aliases = true;
    bool any_private = false;
    for (size_t rank = 0; rank < records.size(); ++rank) {
        same = same && records[rank].structure == records[0].structure && records[rank].step == records[0].step;
        same_aliases = same_aliases && records[rank].aliases == records[0].aliases;
        any_private = any_private || records[rank].has_private_values != 0;
    }
    if (!same) {
        const std::string structure = describe(state, values, peers.world_size());
        const std::string of_rank0 = peers.from_rank0(structure);
        std::optional<Error> difference;
        if (record.step != records[0].step) {
            difference = Error(Code::mismatch,
                               fmt::format("saves step {}, but rank 0 saves step {}", record.step, records[0].step));
        } else if (structure != of_rank0) {
            difference = Error(Code::mismatch,
                               fmt::format("state differs from rank 0's: {}", first_difference(of_rank0, structure)));
        }
        const auto agreed = peers.vote(difference);
        throw Error(agreed.value_or(Error(Code::mismatch, "the ranks' states differ")).with_operation("save"));
    }
    if (check == CheckReplicas::yes) {
        const Aliases none;
        const auto differ = compare_replicas(peers, state, values, same_aliases ? planned->aliases : none, copies);
        if (differ) throw Error(differ->with_operation("save"));
    }
    job.save_id.assign(records[0].save_id.begin(), records[0].save_id.end());
    job.directory = join(root, step_directory_name(job.step, job.save_id));
    if (any_private) {
        const std::vector<std::string> texts = peers.gather(to_json(own).dump());
        for (size_t rank = 0; peers.rank() == 0 && rank < texts.size(); ++rank) {
            const Json own_of_rank = Json::parse(texts[rank], "private values");
            for (const Json::Member& member : own_of_rank.as_object()) {
                job.values.insert_or_assign(member.key, member.value);
            }
        }
    }
    job.error = attempt([&] {
        job.plan = planned->plan;
        if (same_aliases) {
            job.aliases = planned->aliases;
        } else {  // tied on some ranks only: each name is saved for itself
            job.plan =
                std::make_shared<const SavePlan>(make_plan(state, {}, peers.rank(), peers.world_size(), options));
        }
        if (peers.rank() != 0) return;
        for (const auto& [name, value] : values) {
            if (!private_rank(name)) job.values.insert_or_assign(name, value);
        }
    });
}

}  // namespace tsr
