-- Admission: complete -> ready, or dropped. A replica that was slow finds the decision of another one in place.
-- ARGV: for each: stream entry, book, ordinal, reason to drop ('' admits), lowest version ('' when none).
-- Reply: ok, admitted, dropped | no_run
if not CFG.infra then return { 'no_run' } end
local admitted, dropped = 0, 0
for at = 1, #ARGV, 5 do
  local group = load(ARGV[at + 1], ARGV[at + 2])
  if group and group.state == 'complete' then
    if ARGV[at + 3] == '' then
      move(group, 'ready')
      call('HSET', group.key, 'minv', ARGV[at + 4])
      emit('admit', group.book, group.ordinal, usable(group), group.step)
      admitted = admitted + 1
    else
      drop(group, ARGV[at + 3])
      dropped = dropped + 1
    end
  end
  call('XACK', PREFIX .. 'complete', 'admission', ARGV[at])
  call('XDEL', PREFIX .. 'complete', ARGV[at])
end
commit()
return { 'ok', admitted, dropped }
