// A heat map of a request: one cell per layer and query head, by its largest worst_case_tv.
#ifndef CERTKV_CLIENTS_CLI_HEAT_MAP_H_
#define CERTKV_CLIENTS_CLI_HEAT_MAP_H_

#include <string>

#include "certkv/gate/v1/gate.pb.h"

namespace certkv::cli {

// Layers down, heads across, with a legend. A cell's shade is the octave of its value, from 2^-11
// to 1; a head without reads is a dot. `color` adds terminal colours; without it shades alone
// tell. `width` in columns; what does not fit is left out, and a last line says so.
std::string HeatMap(const gate::v1::RequestRisk& risk, bool color, int width);

// Colours when standard output is a terminal and NO_COLOR is not set.
bool WantsColor();

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_HEAT_MAP_H_
