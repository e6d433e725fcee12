// What the agents of a job tell the coordinating one (reports), and what that one tells them (orders). On one host both
// stay inside the process; between hosts each is a JSON object in a frame of a Channel. What arrives is checked as if a
// stranger had sent it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/json.hpp"
#include "launch/job_status.hpp"
#include "launch/summary.hpp"

namespace tsr {

inline constexpr int max_term = 2000;  // rounds are numbered by terms, as an int

// --- reports

// An agent introduces its host.
struct Hello {
    std::string agent;                // random: another agent of the same host has another one
    std::string host;                 // its name
    std::string address;              // of the host, on its way to the coordinating agent
    std::string version;              // of Tessera
    std::string architecture;         // as `uname -m` names it
    int node_rank = -1;               // as the user gave it; -1: not given
    std::vector<int> ranks;           // of each program; 0: other hosts run it
    std::vector<std::string> agreed;  // what has to be the same on all hosts, one line for each
    uint16_t master_port = 0;         // free on that host
    // Of a job with spares.
    std::string job;     // in whose rounds it was; empty: in none yet
    int seat = -1;       // its place among the store hosts
    std::string ballot;  // the job in which it has the vote of its seat; empty: none
    int term = 0;        // the highest one in which it voted, led or followed
};

// A rank has ended; what it left is not read yet.
struct RankEnded {
    int round = 0;
    RankEnd end;
};

// All that is known about a rank's end; sent after every process of the round is dead, or when another process has
// replaced it.
struct RankDetails {
    int round = 0;
    RankEnd end;
};

// Every process of the round is dead on this host.
struct RoundOver {
    int round = 0;
    bool cut_short = false;    // the agent had begun to stop the ranks
    uint16_t master_port = 0;  // for the next round
};

struct StopAsked {
    int signal = 0;
};

struct FlightsAsked {};

// A rank polls for preemption. As an order: a rank of another host does.
struct Listening {};

// The agent cannot go on.
struct NodeFailed {
    std::string message;
    int exit_code = 1;
};

// A store host asks another one for its vote (Election).
struct Stand {
    int term = 0;
    bool binding = false;  // else it asks whether it would get the vote
    friend bool operator==(const Stand&, const Stand&) = default;
};

struct Beat {
    double time = 0;  // the sender's clock: seconds since 1970
};

// What the ranks of the host have counted so far, for whoever looks at the job.
struct Figures {
    int round = 0;
    std::vector<RankStatus> ranks;
};

using Report = std::variant<Hello, RankEnded, RankDetails, RoundOver, StopAsked, FlightsAsked, Listening, NodeFailed,
                            Stand, Beat, Figures>;

// --- orders

struct Welcome {
    std::string job;   // this job's identity, different for each start of it
    std::string run;   // the user's name for it
    std::string host;  // of the coordinating agent
    int term = 0;      // in which it leads; 0: as the owner of the endpoint
    bool votes = false;
};

// A store host's answer to Stand.
struct Vote {
    int term = 0;
    bool binding = false;
    bool yes = false;
    int highest = 0;  // the highest term that it knows of
};

struct Refused {
    std::string why;
};

// A rank that the host is to run.
struct Seat {
    int rank = 0;
    int program = 0;
    int instance = 0;   // of that program, on that host
    int role_rank = 0;  // among the ranks whose programs have the same role
    int role_size = 1;
    friend bool operator==(const Seat&, const Seat&) = default;
};

struct StartRound {
    int round = 0;
    int restarts = 0;  // of those that --max-restarts counts
    int world_size = 1;
    int group_rank = 0;  // of this host
    int group_size = 1;
    std::vector<Seat> seats;     // in order of rank
    std::string master_address;  // of the host of rank 0
    uint16_t master_port = 0;
    uint16_t store_port = 0;  // at the coordinating agent's host
};

struct EndRanks {
    enum class Manner {
        failure,  // soon, after those that wait for a failed rank have noticed
        stop,     // `signal` asks for the end of the job
        change,   // a host joins: the ranks may save
    };
    Manner manner = Manner::failure;
    int signal = 0;
};

// A rank of this host was killed: another process gets its rank, in the same round.
struct ReplaceRank {
    int round = 0;
    int rank = 0;
};

struct WriteFlights {};

// A line to print, and the event that goes with it, if any.
struct Say {
    std::string text;
    std::string event;  // empty: none
    Json::Object fields;
};

// The job has ended.
struct Finish {
    int exit_code = 0;
    std::string text;  // to print; may be empty
};

using Order =
    std::variant<Welcome, Refused, StartRound, EndRanks, ReplaceRank, WriteFlights, Listening, Say, Finish, Vote, Beat>;

// The text of a frame. Long texts of ranks are cut, so that it fits.
[[nodiscard]] std::string encode(const Report& report);
[[nodiscard]] std::string encode(const Order& order);
// Throw CORRUPT.
[[nodiscard]] Report decode_report(const Json& message);
[[nodiscard]] Order decode_order(const Json& message);

}  // namespace tsr
